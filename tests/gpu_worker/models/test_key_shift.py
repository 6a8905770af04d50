"""Keys that are turned on are those that were rotated there at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gpu_worker.kernels.rope.reference import rope
from gpu_worker.models import KeyShift, RopeConfig
from gpu_worker.models.rope import rope_table

CPU = torch.device("cpu")
PLAIN = RopeConfig("default", 10000.0, 16)
KINDS = {
    "default": PLAIN,
    "part of a head": replace(PLAIN, rotary_dim=8),
    "interleaved": replace(PLAIN, interleaved=True),
    "interleaved part": replace(PLAIN, rotary_dim=8, interleaved=True),
    "linear": replace(PLAIN, rope_type="linear", factor=4.0),
    "llama3": replace(PLAIN, rope_type="llama3", factor=8.0, original_max_position_embeddings=64),
    "yarn": replace(PLAIN, rope_type="yarn", factor=4.0, original_max_position_embeddings=64),
}


def rotated(config: RopeConfig, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Keys [T, d] at these positions, by the model's own rotation."""
    table = rope_table(config, 4096, CPU, torch.float32)
    return rope(keys.repeat(1, 3), table, positions, 1, 1, config.interleaved)[1][:, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_turned_key_stands_where_it_was_turned_to(kind: str) -> None:
    config, keys = KINDS[kind], torch.randn(6, 16, generator=torch.Generator().manual_seed(0))
    begin, distance = torch.tensor([0, 1, 2, 3, 700, 9]), torch.tensor([0, 5, 900, 4000, 3000, -9])
    turned = KeyShift.of(config, CPU).apply(rotated(config, keys, begin), distance)
    torch.testing.assert_close(turned, rotated(config, keys, begin + distance), atol=2e-3, rtol=0)
    assert torch.equal(turned[:1], rotated(config, keys[:1], begin[:1]))


def test_heads_of_any_shape_keep_their_type() -> None:
    keys = torch.randn(2, 3, 4, 16)
    distance = torch.tensor([[7], [30]])[..., None].expand(2, 3, 1)
    turned = KeyShift.of(PLAIN, CPU).apply(keys.bfloat16(), distance)
    assert turned.dtype == torch.bfloat16
    alone = KeyShift.of(PLAIN, CPU).apply(keys[1, 2, 3].bfloat16(), torch.tensor(30))
    assert torch.equal(turned[1, 2, 3], alone)
