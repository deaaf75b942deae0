"""Jobs on a cluster of Ray: the nodes are the hosts, and each agent runs in an actor on its node.

``elasticrun --discovery ray -np 4 train.py`` on a machine of the cluster. From Python, with a function that Ray's nodes
need not know::

    elasticstate.launch(train, np=4, min_np=1, discovery="ray")

docs/guides/ray.md describes both.
"""
