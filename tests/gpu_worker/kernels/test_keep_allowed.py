"""Logits masked by packed bits, with numbers beside them, against numpy's unpacking; in both implementations."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from gpu_worker.kernels.keep_allowed import reference

kernel = pytest.importorskip("gpu_worker.kernels.keep_allowed.kernel")

KeepAllowed = Callable[[Tensor, Tensor, Tensor], None]


@pytest.fixture(params=["kernel", "reference"])
def keep_allowed(request: pytest.FixtureRequest) -> KeepAllowed:
    implementation: KeepAllowed = {"kernel": kernel, "reference": reference}[request.param].keep_allowed
    return implementation


def random_words(num_masks: int, vocab_size: int) -> Tensor:
    """With bits behind the vocabulary, too."""
    generator = torch.Generator().manual_seed(vocab_size)
    size = num_masks, -(-vocab_size // 32)
    return torch.randint(-(2**31), 2**31, size, generator=generator, dtype=torch.int64).int()


def is_set(words: Tensor, vocab_size: int) -> Tensor:
    bits = np.unpackbits(words.numpy().view(np.uint8), axis=1, bitorder="little")
    return torch.from_numpy(bits[:, :vocab_size]).bool()


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 97, 1025, 49152, 128256])
def test_what_is_not_allowed_becomes_minus_infinity(
    device: torch.device, keep_allowed: KeepAllowed, vocab_size: int
) -> None:
    rows, words = torch.tensor([4, 0, 2], dtype=torch.int32), random_words(3, vocab_size)
    # As the sampler has them: one of a row before its words.
    packed = torch.cat([rows[:, None], words], dim=1).to(device)
    # Not NaN, which stays where it is.
    around = torch.full((8, vocab_size + 3), 7.0, device=device)
    logits = around[1:6, :vocab_size].normal_()
    expected = around.clone()
    expected[1 + rows.long(), :vocab_size] = torch.where(
        is_set(words, vocab_size).to(device), logits[rows.long()], -math.inf
    )
    keep_allowed(logits, packed[:, 0], packed[:, 1:])
    torch.testing.assert_close(around, expected, rtol=0, atol=0)


def test_what_is_no_number_stays_to_be_found(device: torch.device, keep_allowed: KeepAllowed) -> None:
    logits = torch.tensor([[math.nan, math.inf, -math.inf, 1.0, math.nan, 2.0]], device=device)
    words = torch.tensor([[0b110000]], dtype=torch.int32, device=device)
    keep_allowed(logits, torch.zeros(1, dtype=torch.int32, device=device), words)
    expected = [[math.nan, math.inf, -math.inf, -math.inf, math.nan, 2.0]]
    torch.testing.assert_close(logits.cpu(), torch.tensor(expected), equal_nan=True, rtol=0, atol=0)


def test_without_a_mask_nothing_changes(device: torch.device, keep_allowed: KeepAllowed) -> None:
    logits = torch.randn(3, 40).to(device)
    before = logits.clone()
    none = torch.zeros(0, 3, dtype=torch.int32, device=device)
    keep_allowed(logits, none[:, 0], none[:, 1:])
    assert torch.equal(logits, before)
