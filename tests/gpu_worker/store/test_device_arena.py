"""Memory that a GPU cannot have: refused at the start where the memlock limit is to blame, said once elsewhere."""

from __future__ import annotations

import logging
import re
import resource

import pytest
import torch
from offload_rig import FULL, attached

from gpu_worker.errors import ConfigError
from gpu_worker.store import device_arena
from gpu_worker.store.device_arena import DeviceArena
from gpu_worker.store.host_registration import RegistrationFailed, allow_locking, too_low
from gpu_worker.store.kv_meter import Fallback, KVMeter

CPU = torch.device("cpu")
MIB = 1 << 20


class Limits:
    """The memlock limit of a process without the right to raise its hard one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, soft: int, hard: int) -> None:
        self.soft, self.hard = soft, hard
        self._others = resource.getrlimit
        monkeypatch.setattr(resource, "getrlimit", self._get)
        monkeypatch.setattr(resource, "setrlimit", self._set)

    def _get(self, which: int) -> tuple[int, int]:
        return (self.soft, self.hard) if which == resource.RLIMIT_MEMLOCK else self._others(which)

    def _set(self, which: int, limits: tuple[int, int]) -> None:
        assert which == resource.RLIMIT_MEMLOCK
        assert limits[1] == self.hard
        assert self.hard == resource.RLIM_INFINITY or 0 <= limits[0] <= self.hard
        self.soft = limits[0]


def refuse(*arguments: object) -> None:
    raise RegistrationFailed("CUDA has no memory")


@pytest.mark.parametrize(
    ("soft", "hard", "raised"),
    [
        (1 * MIB, 64 * MIB, 8 * MIB),
        (1 * MIB, 4 * MIB, 4 * MIB),
        (1 * MIB, resource.RLIM_INFINITY, resource.RLIM_INFINITY),
        (1 * MIB, 1 * MIB, 1 * MIB),
        (9 * MIB, 64 * MIB, 9 * MIB),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, resource.RLIM_INFINITY),
    ],
)
def test_the_soft_limit_is_raised_as_far_as_it_may(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, raised: int
) -> None:
    limits = Limits(monkeypatch, soft, hard)
    allow_locking(8 * MIB)
    assert limits.soft == raised
    assert (too_low(8 * MIB) is None) == (raised in (resource.RLIM_INFINITY, 8 * MIB, 9 * MIB))


def test_a_limit_below_the_arena_ends_the_start_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    Limits(monkeypatch, 65536, 65536)
    monkeypatch.setattr(device_arena, "map_arena", refuse)
    with attached(FULL, num_slabs=64) as (_, client):
        with pytest.raises(ConfigError) as caught:
            DeviceArena(client, 2, 256, CPU, KVMeter())
        for words in (
            "65536 bytes",
            str(client.arena.nbytes),
            "ulimit -l",
            "LimitMEMLOCK",
            "--transport shm",
        ):
            assert words in str(caught.value)


def test_a_low_limit_that_nobody_minds_is_no_hindrance(monkeypatch: pytest.MonkeyPatch) -> None:
    Limits(monkeypatch, 65536, 65536)
    with attached(FULL, num_slabs=64) as (_, client):
        assert DeviceArena(client, 2, 256, CPU, KVMeter()).view is not None


@pytest.mark.parametrize(
    ("limit", "remedy"),
    [(resource.RLIM_INFINITY, ""), (65536, "; the memlock limit is 65536 bytes, .*ulimit -l.*")],
)
def test_memory_that_is_refused_later_on_is_said_once_with_the_remedy_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, limit: int, remedy: str
) -> None:
    Limits(monkeypatch, limit, limit)
    meter = KVMeter()
    with attached(FULL, num_slabs=64) as (_, client), caplog.at_level(logging.WARNING):
        arena = DeviceArena(client, 2, 256, CPU, meter)
        arena.close()
        monkeypatch.setattr(device_arena, "map_arena", refuse)
        for _ in range(2):
            arena.map()
    assert arena.view is None
    assert meter.fallbacks[Fallback.THROUGH_HOST] == 1
    (record,) = caplog.records
    said = "rows of the KV store go through the host, which is slower: CUDA has no memory"
    assert re.fullmatch(said + remedy, record.getMessage())
