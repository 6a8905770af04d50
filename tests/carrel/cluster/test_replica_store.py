"""The store of a replica is a Ray actor, and its trainers are actors of low priority in the same placement group."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from ray_cluster import Nodes, ray_nodes
from waiting import PATIENCE, wait_until


def niceness(nodes: Nodes) -> dict[str, list[int]]:
    return {
        kind: [process.nice() for process in nodes.running(f"ray::{kind}")]
        for kind in ("StoreActor", "TrainerActor")
    }


@pytest.mark.e2e
def test_a_replicas_trainers_have_low_priority_and_come_and_go_with_its_store() -> None:
    own = os.nice(0)
    whole = {"StoreActor": [own], "TrainerActor": [max(own, 15)] * 2}
    # as many cores as one replica asks for
    with tempfile.TemporaryDirectory(prefix="crs-", dir="/tmp") as folder, ray_nodes(1, cpus=3) as nodes:
        command = [sys.executable, str(Path(__file__).with_name("replica_store.py")), folder]
        replica = subprocess.Popen(
            command, env=nodes.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            assert replica.stdout is not None
            assert replica.stdout.readline() == "serving\n"
            assert niceness(nodes) == whole
            [store], trainers = nodes.running("ray::StoreActor"), nodes.running("ray::TrainerActor")
            store.kill()
            # Ray starts it again
            wait_until(lambda: not any(each.is_running() for each in (store, *trainers)))
            wait_until(lambda: niceness(nodes) == whole, lambda: str(niceness(nodes)))
            replica.communicate(timeout=PATIENCE)
            assert replica.returncode == 0
            wait_until(lambda: not any(niceness(nodes).values()))
        finally:
            replica.kill()
            replica.wait(PATIENCE)
