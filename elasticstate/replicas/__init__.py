"""Copies of commits in the memory of several hosts: their store, and their transport from host to host.

An agent keeps copies of the commits of its own slots and of slots of other hosts (store.py). It serves them, and the
buffers of its slots, to workers and agents of the job (replica_server.py), and sends copies to other agents
(pusher.py). Workers read with client.py. Nothing here imports torch, and nothing is unpickled.
"""
