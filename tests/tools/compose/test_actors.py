"""How `make compose-test` knows that Ray runs the store; the containers themselves need an engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from waiting import PATIENCE, wait_until

from tools.compose.actors import FIND, check_priorities
from tools.compose.deployment import CheckFailed


def test_one_store_and_trainers_of_low_priority_are_right() -> None:
    check_priorities({"StoreActor": [0], "TrainerActor": [15, 19], "DashboardAgent": [0]})


@pytest.mark.parametrize(
    "found",
    [
        {},
        {"StoreActor": [0]},
        {"StoreActor": [0], "TrainerActor": [15, 0]},
        {"StoreActor": [15], "TrainerActor": [15]},
        {"StoreActor": [0, 0], "TrainerActor": [15]},
        {"TrainerActor": [15]},
    ],
)
def test_anything_else_is_wrong(found: dict[str, list[int]]) -> None:
    with pytest.raises(CheckFailed):
        check_priorities(found)


@pytest.mark.parametrize("title", ["ray::Sample\0", "ray::Sample.run   "])
def test_an_actor_is_found_by_its_title_whatever_it_does(title: str) -> None:
    """Ray writes an actor's class, and its method while one runs, over the process's command line."""
    niceness = os.nice(0) + 3
    command = ["nice", "-n", "3", "bash", "-c", f"exec -a '{title.rstrip(chr(0))}' sleep 600"]
    with subprocess.Popen(command) as process:
        try:

            def found() -> dict[str, list[int]]:
                done = subprocess.run(
                    [sys.executable, "-c", FIND], capture_output=True, text=True, timeout=PATIENCE, check=True
                )
                return dict(json.loads(done.stdout))

            wait_until(lambda: niceness in found().get("Sample", []))
        finally:
            process.kill()
