"""`python -m tools.ray_nodes N`: a Ray cluster of N nodes on this machine, for tests and benchmarks.

Writes one JSON object to stdout when it is up: `{"address": ..., "token_path": ..., "pid": ...}`. Reads commands from
stdin: `kill I` ends node I (0 is the head) with SIGKILL, `add` starts another; each answers `done`. Ends everything
when stdin ends.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
import tempfile
from pathlib import Path
from typing import Any

OBJECT_STORE_BYTES = 80_000_000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("nodes", type=int)
    parser.add_argument("--cpus", type=int, default=2, help="of each node, as Ray counts")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rn-", dir="/tmp") as folder:
        token = Path(folder) / "token"
        with open(os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
        # read when Ray is imported
        os.environ |= {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            # also where Ray's test cluster notes its address: the usual folder may not be there
            "RAY_TMPDIR": folder,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
            # as docs/deployment.md starts nodes: replicas compute, and what runs beside them must not come first
            "RAY_worker_niceness": "0",
            # arenas may fill the node
            "RAY_memory_monitor_refresh_ms": "0",
        }
        _keep(options.nodes, options.cpus)
    return 0


def _keep(num_nodes: int, num_cpus: int) -> None:
    from ray.cluster_utils import Cluster

    shape: dict[str, Any] = {"num_cpus": num_cpus, "num_gpus": 0, "object_store_memory": OBJECT_STORE_BYTES}
    # stdout is ours: Ray prints what it likes
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    head = {**shape, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    # Any: Ray says that there may be none
    nodes: list[Any] = [cluster.head_node]
    try:
        nodes += [cluster.add_node(**shape) for _ in range(num_nodes - 1)]
        cluster.wait_for_nodes()
        about = {
            "address": cluster.address,
            "token_path": os.environ["RAY_AUTH_TOKEN_PATH"],
            "pid": os.getpid(),
        }
        print(json.dumps(about), file=out, flush=True)
        for line in sys.stdin:
            match line.split():
                case ["kill", number]:
                    cluster.remove_node(nodes[int(number)], allow_graceful=False)
                case ["add"]:
                    nodes.append(cluster.add_node(**shape))
            print("done", file=out, flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    sys.exit(main())
