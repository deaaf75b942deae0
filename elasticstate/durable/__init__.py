"""Durable copies of commits: files in a directory or an object store, which outlive all hosts of a job.

::

    <--durable-dir>/
        commit-20261125-091500-123/     one copy; the name is the time (UTC, milliseconds) at which it was begun
            part-1.safetensors          tensors; torch's HuggingFaceStorageReader and safetensors read the file
            part-1.head                 header of the commit, and the random state of its worker
            part-1.objects              all other values: one pickle
            manifest.json               names, sizes and checksums of the other files; written last

A copy without a valid manifest is not complete, and nobody reads it. Head, tensors and objects of a part are the bytes
of a commit file (state/layout.py), in this order. A replicated state has one part. A sharded state has one part for
each distinct shard digest.

The agent of a host stages a commit and starts a process that uploads it (upload.py). Workers read copies
(stored_copies.py) when no worker holds a commit. Nothing here imports torch.
"""
