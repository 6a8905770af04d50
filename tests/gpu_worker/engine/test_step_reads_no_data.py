"""A decode step decides nothing by what lies in its tensors, so that it can be captured with any policy."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from engine_rig import Rig, every_small_policy, request
from torch.utils._python_dispatch import TorchDispatchMode

from gpu_worker.engine.caches import HotCacheSize
from gpu_worker.engine.sequence import Status
from gpu_worker.policies import Family, Policy

aten = torch.ops.aten
READS_DATA = {
    aten._local_scalar_dense,
    aten.item,
    aten.is_nonzero,
    aten.nonzero,
    aten.masked_select,
    aten.unique_dim,
    aten._unique2,
    aten.equal,
    aten.repeat_interleave,
    # What a host's list becomes: its copy to a device waits for it.
    aten.lift_fresh,
    aten.lift_fresh_copy,
}
POLICIES = {name: one for name, one in every_small_policy().items() if one.family is not Family.DENSE}


class NothingIsRead(TorchDispatchMode):
    """Fails where a tensor's content reaches the host; not in references, in whose place a GPU has kernels."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        is_mask = func.overloadpacket in (aten.index, aten.index_put, aten.index_put_) and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if func.overloadpacket in READS_DATA or is_mask:
            where = _callers(sys._getframe())
            if not any(name.endswith("reference.py") for name in where):
                raise AssertionError(f"{func} reads data, in {where[:6]}")
        return func(*args, **(kwargs or {}))


def _callers(frame: FrameType | None) -> list[str]:
    names = []
    while frame is not None:
        if "gpu_worker" in frame.f_code.co_filename:
            names.append(f"{frame.f_code.co_name} {frame.f_code.co_filename}")
        frame = frame.f_back
    return names


def decoding(policy: str, hot_cache: HotCacheSize, num_sequences: int = 3) -> Rig:
    rig = Rig(policies=every_small_policy(), hot_cache=hot_cache)
    rig.submit(*(request(str(n), policy, 60, prompt=150 + n, max_tokens=30) for n in range(num_sequences)))
    for _ in range(200):
        rig.step()
        if len(rig.engine._scheduler.with_status(Status.DECODE)) == num_sequences:
            return rig
    raise AssertionError("not all of them decode")


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_the_device_part_of_a_step_reads_no_data(policy: str) -> None:
    # Whoever recalls has all resident: the host has a part in what is fetched over a store in memory.
    rig = decoding(policy, HotCacheSize())
    decode = rig.engine._decode
    sequences = rig.engine._scheduler.with_status(Status.DECODE)
    for sequence in sequences:
        decode._advance(sequence)
    batch = decode._caches.batch(sequences)
    table = torch.tensor(batch.table)
    with torch.inference_mode(), NothingIsRead():
        decode._forward(batch, table)


def test_what_is_read_is_seen() -> None:
    mask = torch.tensor([True, False])
    reads: list[Callable[[], object]] = [
        lambda: mask.any().item(),
        lambda: torch.arange(2)[mask],
        lambda: mask.nonzero(),
        lambda: bool(mask.all()),
        lambda: torch.tensor([1, 2]),
    ]
    for read in reads:
        for inference in (False, True):
            with (
                torch.inference_mode(inference),
                NothingIsRead(),
                pytest.raises(AssertionError, match="reads data"),
            ):
                read()


def test_every_policy_is_tried() -> None:
    def is_tried(policy: Policy) -> bool:
        return policy.name in POLICIES or policy.family is Family.DENSE

    assert all(map(is_tried, every_small_policy().values()))
