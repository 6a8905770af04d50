"""Histories under faults, by seed: every answer is that of an undisturbed run, or ends in an error that has a type."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_rig import LAYOUT, Rig, random_prompt, request
from faults import Faults, FaultyFolder, faulty_connect, faulty_decode, faulty_prefill
from offload_rig import attached
from waiting import wait_until

from gpu_worker.caches import HotCacheSize
from gpu_worker.errors import WorkerError
from gpu_worker.policies.clusterkv.policy import ClusterKV
from gpu_worker.policies.oracle.policy import Oracle
from gpu_worker.policies.pqcache.policy import PQCache
from gpu_worker.policies.registry import registry
from gpu_worker.records import CompleteEvent, ErrorEvent, FinishReason, GenerationRequest
from gpu_worker.runner.prompts.layered import Prefill
from gpu_worker.runner.steps.decode import DecodeStep
from kv_store.local import LocalStore

TRANSPORTS = ("zero_copy", "shm", "grpc")
NUM_SLABS = 320
# Of each kind often enough to strike some times in a history of a few hundred steps.
RATES = {
    "store.call:drop": 0.02,
    "store.call:delay": 0.05,
    "arena.write:partial": 0.002,
    "index:drop": 0.01,
    "index:alloc": 0.02,
    "prompt:alloc": 0.05,
    "step:alloc": 0.004,
}
# Of the store's disk, which has no room for all that is asked.
DISK_RATES = {
    "disk.write:partial": 0.1,
    "disk.write:alloc": 0.01,
    "disk.read:flip": 0.05,
    "disk.read:delay": 0.1,
}
DISK_BYTES = 1 << 18
MORE_RATES = {
    "zero_copy": {},
    "shm": {"transfer:drop": 0.002},
    "grpc": {"transfer:drop": 0.002, "transfer:partial": 0.002},
}


@contextmanager
def history_rig(
    transport: str, faults: Faults, disk: Path | None = None, seed: int = 0
) -> Iterator[tuple[LocalStore, Rig]]:
    """Few slots, so that much is recalled, and an arena in which not all have room at once."""
    policies = registry(
        PQCache(num_bits=3, num_sink=4, max_iterations=3),
        ClusterKV(num_sink=4, tokens_per_cluster=10, window_size=40, max_iterations=3),
        Oracle(num_sink=4),
    )
    options: dict[str, Any] = {"connect": faulty_connect(faults)} if faults else {}
    if disk is not None:

        def take_faulty(path: Path) -> FaultyFolder:
            return FaultyFolder(path, Faults(DISK_RATES, seed))

        options |= {"disk": disk, "disk_bytes": DISK_BYTES, "take_folder": take_faulty}
    with attached(LAYOUT, transport, NUM_SLABS, **options) as (store, client):
        yield (
            store,
            Rig(
                max_num_seqs=4,
                hot_cache=HotCacheSize(tokens=1),
                max_model_len=256,
                policies=policies,
                client=client,
                reuses_prefixes=True,
                make_prefill=faulty_prefill(faults) if faults else Prefill,
                make_decode=faulty_decode(faults) if faults else DecodeStep,
            ),
        )


def pool_of_requests() -> list[GenerationRequest]:
    """Documents that several begin with, of every family."""
    documents = [random_prompt(length, length) for length in (90, 150, 60)]
    shapes = [("full", 1.0), ("pqcache", 0.3), ("clusterkv", 0.3), ("pqcache", 1.0), ("snapkv", 0.4)]
    return [
        request(
            f"{number}",
            policy,
            budget,
            prompt=(*documents[number % 3], *random_prompt(5, number)),
            max_tokens=14,
        )
        for number, (policy, budget) in enumerate(shapes * 2)
    ]


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, list[int]]:
    """Each one's tokens, alone and with nothing known."""
    alone = {}
    with history_rig("zero_copy", Faults()) as (_, rig):
        for one in pool_of_requests():
            alone[one.request_id] = rig.run(replace(one, shares_prefix=False))[0].tokens
    assert all(len(tokens) == 14 for tokens in alone.values())
    return alone


class History:
    """One schedule: what is asked, aborted, and restarted, at which step."""

    def __init__(self, seed: int, store: LocalStore, rig: Rig) -> None:
        self._draw = random.Random(f"history {seed}")
        self._store, self._rig = store, rig
        self.asked: dict[str, GenerationRequest] = {}

    def run(self, num_requests: int, most_steps: int = 20000) -> None:
        pool, rig, draw = pool_of_requests(), self._rig, self._draw
        for step in range(most_steps):
            if len(self.asked) < num_requests and draw.random() < 0.15:
                one = draw.choice(pool)
                name = f"{one.request_id} at {step}"
                self.asked[name] = one
                rig.submit(replace(one, request_id=name))
            if self.asked and draw.random() < 0.01:
                rig.engine.abort(draw.choice([*self.asked]))
            if draw.random() < 0.002:
                self._store.restart()
            rig.step()
            rig.engine.check_store()
            if len(self.asked) == num_requests and not rig.engine.has_work:
                return
        raise AssertionError(f"requests are left: {rig.engine.stats()}")

    def check(self, undisturbed: dict[str, list[int]]) -> int:
        """How many of them were answered to the end."""
        num_whole = 0
        for name, one in self.asked.items():
            record, expected = self._rig.records[name], undisturbed[one.request_id]
            assert record.tokens == expected[: len(record.tokens)], name
            match record.last:
                case CompleteEvent(finish_reason=reason):
                    assert reason is FinishReason.ABORT or record.tokens == expected, name
                    num_whole += record.tokens == expected
                case ErrorEvent(error=error):
                    assert isinstance(error, WorkerError), name
                case other:
                    raise AssertionError(f"{name} ends with {other}")
        return num_whole


def check_history(seed: int, undisturbed: dict[str, list[int]], num_requests: int, folder: Path) -> None:
    transport = TRANSPORTS[seed % len(TRANSPORTS)]
    faults = Faults(RATES | MORE_RATES[transport], seed)
    with history_rig(transport, faults, folder, seed) as (store, rig):
        history = History(seed, store, rig)
        history.run(num_requests)
        num_whole = history.check(undisturbed)
        disk = store.server.store.stats().disk
        print(f"seed {seed}, {transport}: {num_whole} of {len(history.asked)} whole; since a start {disk}")
        print(dict(faults.struck))
        assert faults.struck
        # Whatever happened, the next one is served, and nothing of the others is left.
        faults.end()
        wait_until(lambda: rig.engine.check_store() is None and rig.engine.is_store_reachable)
        last = replace(pool_of_requests()[1], request_id="last")
        rig.submit(last)
        # What it begins with may come from the disk, and thousands of steps go by meanwhile.
        wait_until(lambda: rig.step() is None and rig.records["last"].is_over, poll=0.001)
        assert rig.records["last"].tokens == undisturbed["1"]
        stats = rig.engine.stats()
        assert (stats.running, stats.waiting, stats.slot_used_tokens) == (0, 0, 0)
        assert rig.client.stats().num_sequences == 0


@pytest.mark.parametrize("seed", range(3))
def test_answers_are_right_or_errors(seed: int, undisturbed: dict[str, list[int]], tmp_path: Path) -> None:
    check_history(seed, undisturbed, 10, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(3, 103))
def test_answers_are_right_or_errors_of_many_seeds(
    seed: int, undisturbed: dict[str, list[int]], tmp_path: Path
) -> None:
    check_history(seed, undisturbed, 24, tmp_path)
