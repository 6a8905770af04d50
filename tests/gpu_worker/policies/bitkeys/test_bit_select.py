"""Selection by two-bit keys: by the levels of the scores that the same module gives, sorted one by one."""

from __future__ import annotations

import pytest
import torch
from operations.bits import SCALE, bit_index
from torch import Tensor

from gpu_worker.policies.bitkeys.bit_score import reference as score_reference
from gpu_worker.policies.bitkeys.bit_select import reference

kernel = pytest.importorskip("gpu_worker.policies.bitkeys.bit_select.kernel")


def check(inputs: tuple[Tensor, ...], asked: tuple[int, ...], num_positions: int) -> None:
    *index, begin, end = inputs
    counts = torch.tensor(asked, device=begin.device)
    for module in kernel, reference:
        weights = module.bit_score(*inputs, SCALE, num_positions)
        group = inputs[0].shape[1] // weights.shape[1]
        levels = score_reference.levels(weights, counts, group).tolist()
        taken = module.bit_select(*index, begin, end, counts, max(asked), num_positions, SCALE)
        assert taken.dtype == torch.int64
        for row, (first, last, count) in enumerate(zip(begin.tolist(), end.tolist(), asked, strict=True)):
            for head, of_head in enumerate(levels[row]):
                ranked = sorted(((of_head[n], n) for n in range(first, last)), reverse=True)
                expected = sorted(n for _, n in ranked[:count])
                assert taken[row, head].tolist() == expected + [-1] * (max(asked) - len(expected))


@pytest.mark.parametrize(
    ("group", "head_dim", "length", "dtype"),
    [(3, 80, 303, torch.bfloat16), (1, 256, 512, torch.float32)],
)
def test_the_best_by_level_are_taken(
    device: torch.device, group: int, head_dim: int, length: int, dtype: torch.dtype
) -> None:
    # Some, none, more than there are; and nothing to take from.
    spans = ((4, 281), (0, 290), (2, 30), (5, 5))
    check(bit_index(device, group, head_dim, spans, length, dtype), (40, 0, 33, 7), 290)


@pytest.mark.parametrize(("most_words", "most_warps"), [(32768, 16), (32768, 1), (1, 16)])
def test_long_heads_are_taken_from_in_chunks_or_sorted_out_by_scores(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, most_words: int, most_warps: int
) -> None:
    """Where there is one warp it has all registers."""
    monkeypatch.setattr(kernel, "MAX_WORDS", most_words)
    monkeypatch.setattr(kernel, "MOST_WARPS", most_warps)
    monkeypatch.setattr(kernel, "PROGRAMS", 12)
    monkeypatch.setattr(kernel, "STEP_WORDS", 1)
    monkeypatch.setattr(kernel, "LONG_STEP_WORDS", 2)
    check(bit_index(device, 2, 16, ((3, 1290), (600, 1100)), 1300), (100, 350), 1300)


def test_ties_go_to_the_higher_position(device: torch.device) -> None:
    query, *others = bit_index(device, 2, 64, ((3, 40), (0, 290)), 290)
    check((torch.zeros_like(query), *others), (5, 290), 290)
    # What is too light to tell apart, and what is heavier than its level says.
    scales = others[2]
    scales[:, :, 5:20] *= 400
    check((query, *others), (9, 200), 290)
