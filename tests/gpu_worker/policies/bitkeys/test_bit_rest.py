"""The stand-in for unselected candidates: kernel and reference agree, and are near to what it stands for."""

from __future__ import annotations

import math
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from kernel_rig import amid_nan
from operations.bits import bit_index
from policy_index import SHAPE, Tokens, candidates_of, grow, new_index
from seat_rig import seated

from gpu_worker.kernels.attention import Rest
from gpu_worker.policies.bitkeys.bit_rest import reference
from gpu_worker.policies.bitkeys.policy import BitKeys
from kv_store.client import RowFormat

kernel = pytest.importorskip("gpu_worker.policies.bitkeys.bit_rest.kernel")
fit_kernel = pytest.importorskip("gpu_worker.policies.bitkeys.bit_rest.fit_kernel")


@pytest.mark.parametrize(
    ("group", "head_dim", "dtype"), [(3, 80, torch.bfloat16), (9, 64, torch.float16), (1, 24, torch.float32)]
)
def test_the_kernel_sums_up_what_the_reference_does(
    device: torch.device, group: int, head_dim: int, dtype: torch.dtype
) -> None:
    # More candidates than are sampled, few, one, and none.
    spans = ((4, 1290), (5, 40), (2, 3), (5, 5))
    query, rotation, codes, scales, _, seats, begin, end = bit_index(
        device, group, head_dim, spans, 1300, dtype
    )
    generator = torch.Generator().manual_seed(1)
    drawn = [
        torch.randn(4, 3, *size, generator=generator)
        for size in ((head_dim,), (head_dim,), (head_dim, head_dim))
    ]
    drawn[2] = drawn[2].bfloat16()
    fits = [seated(each.to(device), seats, float("nan")) for each in drawn]
    selected = torch.full((4, 3, 100), -1)
    selected[0, 0] = torch.arange(4, 1204, 12)
    selected[0, 1, :90] = torch.arange(1200, 1290)
    # All of them.
    selected[1, :2, :35] = torch.arange(5, 40)
    inputs = query, rotation, codes, scales, *fits, seats, begin, end, selected.to(device), 0.002
    found, expected = kernel.bit_rest(*inputs), reference.bit_rest(*inputs)
    torch.testing.assert_close(found.log_weights, expected.log_weights, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(found.values, expected.values, atol=0.05, rtol=0.01)
    assert (expected.log_weights.view(4, 3, group) == float("-inf")).any(dim=2).tolist() == [
        [False] * 3,
        [True, True, False],
        [False] * 3,
        [True] * 3,
    ]


@pytest.mark.parametrize("number", [2 * kernel.TILE + 1, kernel.TILE, 1])
def test_selected_samples_are_left_out_wherever_they_are_listed(device: torch.device, number: int) -> None:
    query, rotation, codes, scales, _, seats, begin, end = bit_index(device, 2, 16, ((3, 5203),), 5203)
    nothing = torch.zeros(1, 3, 16, 16, device=device)
    fits = [
        seated(each, seats, float("nan")) for each in (nothing[..., 0], nothing[..., 0], nothing.bfloat16())
    ]
    # Of the first head the last positions, of the second the first, of the third some of all; every 11th is a sample.
    some = torch.randperm(5200, generator=torch.Generator().manual_seed(2))[:number].sort().values + 3
    selected = torch.stack([torch.arange(5203 - number, 5203), torch.arange(3, 3 + number), some])[None]
    inputs = query, rotation, codes, scales, *fits, seats, begin, end, selected.to(device), 0.002
    found, expected = kernel.bit_rest(*inputs), reference.bit_rest(*inputs)
    torch.testing.assert_close(found.log_weights, expected.log_weights, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    ("module", "programs"),
    [(reference, 132), (fit_kernel, 132), (fit_kernel, 4)],
    ids=["reference", "kernel", "few"],
)
@pytest.mark.parametrize("head_dim", [16, 40])
@pytest.mark.parametrize(
    ("dtype", "off"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02), (torch.float16, 0.02)]
)
def test_slopes_are_covariances_wherever_keys_lie(
    device: torch.device,
    dtype: torch.dtype,
    off: float,
    module: ModuleType,
    programs: int,
    head_dim: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reference, "FITTED", 300)
    # Of few, each has several tiles.
    monkeypatch.setattr(fit_kernel, "PROGRAMS", programs)
    generator = torch.Generator().manual_seed(3)
    keys = torch.randn(2, 700, head_dim, generator=generator) * 4
    # Far from 0, so that what is rounded before it is centred is lost.
    values = 0.1 * (keys.flip(-1) + torch.randn(2, 700, head_dim, generator=generator)) + 50
    keys[..., 5] += 40
    # Rows as the pool has them; what is known of the keys' mean is of more tokens.
    rows = torch.cat([keys, values], dim=-1).to(device, dtype)
    keys, values = amid_nan(rows, 8).split(head_dim, dim=2)
    value_means, slopes = (
        torch.full(shape, math.nan, device=device) for shape in ((2, head_dim), (2, head_dim, head_dim))
    )
    module.fit_values(keys, values, keys.float().mean(dim=1) + 0.05, value_means, slopes)
    exact_keys, exact_values = keys.double(), values.double()
    centred = (
        exact_keys - exact_keys.mean(dim=1, keepdim=True),
        exact_values - exact_values.mean(dim=1, keepdim=True),
    )
    expected = centred[0].mT @ centred[1] / 700
    assert float((slopes - expected).norm() / expected.norm()) < off
    torch.testing.assert_close(value_means.double(), exact_values.mean(dim=1), atol=1e-4, rtol=1e-4)


def test_it_is_near_to_what_it_stands_for() -> None:
    shape = replace(SHAPE, row_format=RowFormat(64, "fp32"), max_model_len=1100)
    policy = BitKeys(rest="fitted")
    index, tokens = new_index(policy, shape), Tokens.random(1100, 0, shape)
    tokens.keys[..., 3] += 3.0
    begin, end = grow(policy, index, 1, tokens, policy.plan(1000, 50))
    query = torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(2)) / 2
    candidates = candidates_of(query, {1: (begin, end)}, layer=1)
    selected = policy.select(index, candidates, torch.tensor([40]), 40)
    rest = Rest.room(query)
    policy.stand_in(index, candidates, selected, rest)
    for head in range(4):
        # Their values are their keys.
        keys = tokens.keys[1, head // 2, :end]
        others = [n for n in range(begin, end) if n not in selected[0, head // 2]]
        logits = keys[others] @ query[0, head] * SHAPE.scale
        exact = logits.softmax(0) @ keys[others]
        assert rest.log_weights[0, head] == pytest.approx(float(logits.logsumexp(0)), abs=0.15)
        mean = keys[others].mean(dim=0)
        assert (rest.values[0, head] - exact).norm() < 0.5 * (mean - exact).norm()
    assert (policy.stands_in, BitKeys(rest="none").stands_in) == (True, False)
