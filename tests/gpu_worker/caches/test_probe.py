"""The distance of an attention output from that over every token, per query head."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from gpu_worker.caches.probe import output_errors

SCALE = 0.3


def test_each_query_head_is_held_against_attention_over_its_groups_rows() -> None:
    torch.manual_seed(0)
    query, rows = torch.randn(3, 4, 8), torch.randn(3, 2, 20, 16)
    shared = rows.repeat_interleave(2, dim=1)
    exact = scaled_dot_product_attention(query[:, :, None], shared[..., :8], shared[..., 8:], scale=SCALE)
    given = exact[:, :, 0].clone()
    given[1, 2] *= 0.75
    given[2, 3] = 0.0
    expected = torch.zeros(3, 4)
    expected[1, 2], expected[2, 3] = 0.25, 1.0
    torch.testing.assert_close(output_errors(query, rows, given, SCALE), expected, atol=1e-5, rtol=0)
