"""The Ray actors of the store's container, as its kernel sees them, and an index that they train."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import httpx

from tools.compose.asking import ANSWER, ask_by_rest
from tools.compose.deployment import STORE, CheckFailed, Deployment, docker

STORE_ACTOR, TRAINER_ACTOR = "StoreActor", "TrainerActor"
# Niceness from which on a process gets next to nothing while others compute.
LOW_PRIORITY = 15
TRAININGS = "carrel_store_index_trainings_total"
TRAINED_POLICY = "pqcache"
# Prints the niceness of each Ray actor, by its class.
FIND = """
import json, os, pathlib
found = {}
for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    try:
        name, niceness = path.read_text(), os.getpriority(os.PRIO_PROCESS, int(path.parent.name))
    except OSError:
        continue
    if name.startswith("ray::"):
        found.setdefault(name[5:].split("\\0")[0].split(".")[0].strip(), []).append(niceness)
print(json.dumps(found))
"""


def check_priorities(found: Mapping[str, Sequence[int]]) -> None:
    """Raises CheckFailed unless there is one store, with the priority of any process, and trainers of a low one."""
    stores, trainers = found.get(STORE_ACTOR, ()), found.get(TRAINER_ACTOR, ())
    shown = f"Ray's actors in the store's container have the niceness {dict(found)}"
    if len(stores) != 1 or stores[0] != 0:
        raise CheckFailed(f"{shown}: one {STORE_ACTOR} of 0 is expected")
    if not trainers or min(trainers) < LOW_PRIORITY:
        raise CheckFailed(
            f"{shown}: at least one {TRAINER_ACTOR}, and each from {LOW_PRIORITY} on, is expected"
        )
    print(f"compose-test: {shown}", flush=True)


def check_actors(deployment: Deployment) -> None:
    """Raises CheckFailed unless Ray runs the store and its trainers."""
    check_priorities(json.loads(docker("exec", deployment.container(STORE), "python", "-c", FIND)))


def train_index(deployment: Deployment) -> None:
    """Ask under a policy that trains. Raises CheckFailed unless the trainers did, and the answer is right."""
    before = _num_trainings(deployment)
    ask_by_rest(deployment, TRAINED_POLICY)
    trained = _num_trainings(deployment) - before
    if not trained:
        raise CheckFailed(f"{TRAINED_POLICY} answered {ANSWER}, and no index was trained")
    print(f"compose-test: {trained} indexes were trained", flush=True)


def _num_trainings(deployment: Deployment) -> int:
    reply = httpx.get(
        f"http://127.0.0.1:{deployment.port}/metrics",
        headers={"Authorization": f"Bearer {deployment.key}"},
        trust_env=False,
    )
    values = [line.rpartition(" ")[2] for line in reply.text.splitlines() if line.startswith(TRAININGS)]
    if len(values) != 1:
        raise CheckFailed(f"/metrics: {reply.status_code}, with {len(values)} values of {TRAININGS}")
    return int(float(values[0]))
