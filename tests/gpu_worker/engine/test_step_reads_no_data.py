"""A decode step decides nothing by what lies in its tensors, so that it can be captured with any policy."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from device_reads import DeviceReads
from engine_rig import Rig, every_small_policy, request, tried

from gpu_worker.caches import HotCacheSize


def decoding(
    policy: str, hot_cache: HotCacheSize, num_sequences: int = 3, trains_indexes: bool = False
) -> Rig:
    rig = Rig(policies=every_small_policy(), hot_cache=hot_cache, trains_indexes=trains_indexes)
    rig.submit(*(request(str(n), policy, 60, prompt=150 + n, max_tokens=100) for n in range(num_sequences)))
    for _ in range(200):
        rig.step()
        if len(rig.decoding) == num_sequences:
            return rig
    raise AssertionError("not all of them decode")


@pytest.mark.parametrize("policy", sorted(tried()))
def test_the_device_part_of_a_step_reads_no_data(policy: str) -> None:
    # Whoever recalls has all resident: the host has a part in what is fetched over a store in memory.
    rig = decoding(policy, HotCacheSize())
    decode = rig.runner.decode
    sequences = rig.decoding
    with torch.inference_mode():
        for sequence in sequences:
            decode.advance(sequence)
    batch = rig.runner.caches.batch(sequences)
    table = torch.tensor(batch.table)
    with torch.inference_mode(), DeviceReads() as reads:
        decode.forward(batch, table)
    assert not reads.found


@pytest.mark.parametrize("trains_indexes", [False, True])
def test_what_leaves_the_window_together_is_clustered_without_reading_data(trains_indexes: bool) -> None:
    rig = decoding("clusterkv", HotCacheSize(), 1, trains_indexes)
    decode, (sequence,) = rig.runner.decode, rig.decoding
    for window in (1, 2):
        while sequence.num_tokens < 150 + 40 * window:
            rig.step()
        begin = sequence.window_begin
        with torch.inference_mode(), DeviceReads() as reads:
            decode.advance(sequence)
        assert sequence.window_begin == begin + 40
        assert not reads.found


def test_what_is_read_is_seen() -> None:
    mask = torch.tensor([True, False])
    reads: list[Callable[[], object]] = [
        lambda: mask.any().item(),
        lambda: torch.arange(2)[mask],
        lambda: mask.nonzero(),
        lambda: bool(mask.all()),
        lambda: mask.tolist(),
        lambda: torch.tensor([1, 2]),
    ]
    for read in reads:
        for inference in (False, True):
            with torch.inference_mode(inference), DeviceReads() as seen:
                read()
            assert len(seen.found) == 1
