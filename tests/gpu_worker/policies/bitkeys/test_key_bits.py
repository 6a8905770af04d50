"""Two bits a coordinate, by kernel and reference, against the nearest of four values in double precision."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_rig import amid_nan
from seat_rig import seats_of
from torch import Tensor

from gpu_worker.policies.bitkeys.key_bits import reference
from gpu_worker.policies.bitkeys.rotation import Rotation

kernel = pytest.importorskip("gpu_worker.policies.bitkeys.key_bits.kernel")

# Of a step: so near a border between two codes either is right, as a kernel rounds keys to bfloat16.
NEAR = 0.01


def unpacked(codes: Tensor, head_dim: int) -> Tensor:
    """Each coordinate's code: [..., d]. The bits of coordinates that there are none of are 0."""
    quarters = [(codes.cpu().long() >> shift) & 3 for shift in (0, 2, 4, 6)]
    every = torch.cat(quarters, dim=-1)
    every -= 4 * (every >= 2)
    assert (every[..., head_dim:] == 0).all()
    return every[..., :head_dim]


def check(codes: Tensor, scales: Tensor, centred: Tensor, rotation: Tensor) -> None:
    """Codes and scales of centred keys [..., d] in double precision."""
    rotated = centred @ rotation.cpu().double().T
    square = rotated.square().sum(-1)
    steps = rotated / (0.9957 * (square / rotated.shape[-1]).sqrt())[..., None].clamp(min=1e-30)
    found = unpacked(codes, rotated.shape[-1])
    borders = torch.tensor([-1.0, 0.0, 1.0])
    is_clear = ((steps[..., None] - borders).abs() > NEAR).all(-1)
    assert torch.equal(found[is_clear], (steps[..., None] > borders).sum(-1)[is_clear] - 2)
    assert is_clear.double().mean() > 0.9
    # The estimate of a key's product with itself is exact but for rounding: the interpreter cuts bfloat16 off.
    estimated = scales.double().cpu() * (rotated * (found + 0.5)).sum(-1)
    torch.testing.assert_close(estimated, square, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [
        (128, torch.bfloat16),
        (64, torch.float32),
        (80, torch.float16),
        (256, torch.bfloat16),
        (160, torch.float32),
        (6, torch.float32),
    ],
)
@pytest.mark.parametrize("programs", [264, 2])
def test_codes_of_a_prompt(
    device: torch.device, head_dim: int, dtype: torch.dtype, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A program has one tile, or all.
    monkeypatch.setattr(kernel, "PROGRAMS", programs)
    generator = torch.Generator().manual_seed(head_dim)
    # Some channels are large in all keys, and some vary more.
    keys = torch.randn(2, 131, head_dim, generator=generator) * torch.rand(head_dim, generator=generator) * 4
    keys = (keys + 3 * torch.randn(head_dim, generator=generator)).to(dtype)
    means = keys.float().mean(dim=1)
    width, rotation = -(-head_dim // 4), Rotation.of(head_dim, device).matrix
    for module in kernel, reference:
        codes = torch.full((2, 140, width), 113, dtype=torch.uint8, device=device)
        scales = torch.full((2, 140), math.nan, dtype=torch.float16, device=device)
        module.code_prompt(amid_nan(keys.to(device)), means.to(device), rotation, codes, scales)
        assert (codes[:, 131:] == 113).all()
        assert scales[:, 131:].isnan().all()
        check(codes[:, :131], scales[:, :131], keys.double() - means[:, None].double(), rotation)


@pytest.mark.parametrize(
    ("head_dim", "num_tokens", "num_sinks", "dtype"),
    [
        (128, 1000, 4, torch.bfloat16),
        (64, 65, 64, torch.float32),
        (80, 64, 1, torch.float16),
        (6, 1, 1, torch.float32),
        (64, 70, 0, torch.float32),
        (96, 9000, 3, torch.bfloat16),
    ],
)
def test_the_mean_of_keys_and_sinks_less_it(
    device: torch.device, head_dim: int, num_tokens: int, num_sinks: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    keys = torch.randn(3, num_tokens, head_dim, generator=generator) + torch.arange(3.0)[:, None, None]
    keys = keys.to(dtype)
    expected = keys.double().mean(dim=1)
    for module in kernel, reference:
        means = torch.full((3, head_dim), math.nan, device=device)
        # Others' sinks lie between.
        sinks = torch.full((3, num_sinks + 2, head_dim), math.nan, device=device)
        module.centre(amid_nan(keys.to(device)), means, sinks[:, :num_sinks])
        torch.testing.assert_close(means.cpu().double(), expected, rtol=1e-5, atol=1e-5)
        less = keys[:, :num_sinks].double() - expected[:, None]
        torch.testing.assert_close(sinks[:, :num_sinks].cpu().double(), less, rtol=1e-4, atol=1e-4)
        assert sinks[:, num_sinks:].isnan().all()


@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(128, torch.bfloat16), (96, torch.float16), (64, torch.float32)]
)
def test_codes_of_what_leaves_the_window(device: torch.device, head_dim: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(head_dim)
    # Every token's key lies beside its value.
    rows = torch.randn(4, 2, 3, 2 * head_dim, generator=generator).to(dtype)
    rows[1] = math.nan
    seats, positions = seats_of(4, device), torch.tensor([7, -1, 0, 39], device=device)
    width, rotation = -(-head_dim // 4), Rotation.of(head_dim, device).matrix
    means = torch.full((6, 3, 3, head_dim), math.nan)
    means[seats.cpu(), 1:] = torch.randn(4, 2, 3, head_dim, generator=generator)
    for module in kernel, reference:
        codes = torch.full((6, 3, 3, 40, width), 113, dtype=torch.uint8, device=device)
        scales = torch.full((6, 3, 3, 40), math.nan, dtype=torch.float16, device=device)
        module.code_leaving(
            rows.to(device)[..., :head_dim], means.to(device)[:, 1:], rotation, codes[:, 1:], scales[:, 1:],
            seats, positions,
        )  # fmt: skip
        for lane in 0, 2, 3:
            seat, position = int(seats[lane]), int(positions[lane])
            centred = rows[lane, ..., :head_dim].double() - means[seat, 1:].double()
            found = codes[seat, 1:, :, position], scales[seat, 1:, :, position]
            check(*found, centred, rotation)
            found[0].fill_(113)
            found[1].fill_(math.nan)
        # Nothing else was written.
        assert (codes == 113).all()
        assert scales.isnan().all()


def test_keys_that_are_the_mean_weigh_nothing_and_long_ones_are_bounded(device: torch.device) -> None:
    keys = torch.zeros(1, 3, 64, device=device)
    keys[0, 1, 5] = 3e6
    for module in kernel, reference:
        codes = torch.zeros(1, 3, 16, dtype=torch.uint8, device=device)
        scales = torch.full((1, 3), math.nan, dtype=torch.float16, device=device)
        rotation = Rotation.of(64, device).matrix
        module.code_prompt(keys, torch.zeros(1, 64, device=device), rotation, codes, scales)
        assert scales.tolist() == [[0.0, 65504.0, 0.0]]


@pytest.mark.parametrize("head_dim", [1, 8, 80, 96, 128])
def test_a_rotation_keeps_products_and_spreads_a_channel(head_dim: int) -> None:
    matrix = Rotation.of(head_dim, torch.device("cpu")).matrix
    product = matrix.double() @ matrix.double().T
    torch.testing.assert_close(product, torch.eye(head_dim, dtype=torch.float64), atol=2e-3, rtol=0)
    assert torch.equal(matrix, Rotation.of(head_dim, torch.device("cpu")).matrix)
    assert matrix.abs().max() <= 5 / head_dim**0.5
