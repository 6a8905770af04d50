"""A replica without a worker: `python replica_store.py FOLDER`, on the Ray at RAY_ADDRESS. Prints a line when its store
serves, and ends the store when stdin ends."""

import sys
from pathlib import Path

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from carrel.cluster.app import replica_options
from carrel.cluster.options import read_arguments
from carrel.cluster.services import await_store, start_store, stop_store, store_config
from carrel.serve.endpoints import Endpoints

ARGUMENTS = {"arena-bytes": "1MiB", "slab-bytes": "64KiB", "store-cpus": 2}


class Replica:
    """The store as ReplicaServices starts it."""

    def __init__(self, folder: str) -> None:
        resolved = read_arguments(ARGUMENTS)
        config = store_config(resolved, Endpoints(Path(folder), "127.0.0.1", 0, 0))
        self._store = start_store(config, resolved.options.store_cpus)
        await_store(self._store)

    def ready(self) -> None:
        """The store serves."""

    def stop(self) -> None:
        stop_store(self._store)


def main() -> None:
    ray.init(logging_level="ERROR", log_to_driver=False)
    chosen = replica_options(read_arguments(ARGUMENTS).options)
    group = placement_group(chosen["placement_group_bundles"], strategy=chosen["placement_group_strategy"])
    where = PlacementGroupSchedulingStrategy(group, 0, True)
    # its class goes by value: the node does not have this file
    replica = ray.remote(Replica).options(scheduling_strategy=where, num_cpus=1).remote(sys.argv[1])
    ray.get(replica.ready.remote())
    print("serving", flush=True)
    sys.stdin.read()
    ray.get(replica.stop.remote())


if __name__ == "__main__":
    main()
