"""A real cluster of Ray on this machine. Each line of stdin is a command, and each answer a line of JSON.

``add CPUS`` (answer: the id of the new node), ``remove ID`` (without grace: its processes are killed). The
first line is the address of the cluster. ``requested CPU``: the number of CPUs that Ray's autoscaler is asked for. The
cluster ends with its stdin.
"""

from __future__ import annotations

import json
import sys

from ray._private.ray_constants import AUTOSCALER_RESOURCE_REQUEST_CHANNEL
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster


def answer(value: object) -> None:
    print(json.dumps(value), flush=True)


def serve() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        client = GcsClient(address=cluster.address)
        answer(cluster.address)
        for line in sys.stdin:
            command, value = line.split()
            if command == "add":
                answer(cluster.add_node(num_cpus=int(value)).node_id)
            elif command == "requested":
                asked = client.internal_kv_get(AUTOSCALER_RESOURCE_REQUEST_CHANNEL, None)
                answer(str(sum(bundle.get(value, 0) for bundle in json.loads(asked or "[]"))))
            else:
                (node,) = (node for node in cluster.list_all_nodes() if node.node_id == value)
                cluster.remove_node(node, allow_graceful=False)
                answer("removed")
    finally:
        cluster.shutdown()


serve()
