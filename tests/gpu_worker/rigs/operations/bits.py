"""BitKeys' operations on keys of two bits a coordinate."""

from __future__ import annotations

import math

import torch
from kernel_contract import Arguments, Operation, case
from seat_rig import at_seats, seats_of
from torch import Tensor, bfloat16, float16, float32

from gpu_worker.policies.bitkeys.rotation import Rotation
from operations.pages import Spans

SCALE = 0.02
# Of a step: so near a border between two codes either is right, as a kernel rounds keys to bfloat16.
NEAR = 0.01
CPU = torch.device("cpu")


def bit_keys(
    group: int,
    head_dim: int,
    spans: Spans,
    length: int,
    dtype: torch.dtype = float32,
    bound: int = 0,
    factor: int = 1,
) -> Arguments:
    """Three KV heads; NaN or other bytes wherever nothing may be read. factor: of the queries; 0: all weigh alike.

    Queries are whole numbers of which the largest is 127, and the rotation moves and negates them, so that rounding
    changes nothing and every product is exact.
    """
    batch, generator = len(spans), torch.Generator().manual_seed(length)
    query = torch.randint(-20, 21, (batch, 3 * group, head_dim), generator=generator)
    query[..., head_dim // 3] = 127
    order, signs = torch.randperm(head_dim, generator=generator), torch.ones(head_dim)
    signs[::3] = -1
    codes = torch.randint(0, 256, (batch, 3, length, -(-head_dim // 4)), generator=generator).to(torch.uint8)
    scales = torch.full((batch, 3, length), math.nan, dtype=float16)
    sinks = torch.full((batch, 3, 5, head_dim), math.nan)
    for row, (first, last) in enumerate(spans):
        scales[row, :, first:last] = (torch.rand(3, last - first, generator=generator) / 4).half()
        num_sinks = min(first, 5)
        sinks[row, :, :num_sinks] = torch.randint(-2, 3, (3, num_sinks, head_dim), generator=generator) / 4
    seats = seats_of(batch, CPU)
    begin, end = torch.tensor(spans).T
    return {
        "query": (factor * query).to(dtype),
        "rotation": (torch.eye(head_dim)[order] * signs).bfloat16(),
        "codes": at_seats(codes, seats, 255),
        "scales": at_seats(scales, seats, math.nan),
        "sinks": at_seats(sinks, seats, math.nan),
        **{"seats": seats, "begin": begin, "end": end},
        **{"scale": SCALE, "num_positions": bound or length},
    }


def bit_index(device: torch.device, *size: object) -> tuple[Tensor, ...]:
    """The tensors of `bit_keys`, in its order, on a device."""
    arguments = bit_keys(*size)  # type: ignore[arg-type]
    return tuple(each.to(device) for each in arguments.values() if isinstance(each, Tensor))


def summed_weights(
    query: Tensor, rotation: Tensor, codes: Tensor, scales: Tensor, sinks: Tensor, seats: Tensor, begin: Tensor,
    end: Tensor, scale: float, num_positions: int,
) -> Tensor:  # fmt: skip
    group, head_dim = query.shape[1] // 3, query.shape[2]
    expected = torch.full((len(seats), 3, num_positions), -math.inf, dtype=torch.float64)
    for row, (seat, first, last) in enumerate(torch.stack([seats, begin, end], dim=1).tolist()):
        # Every stride-th of them, at most 512.
        stride = max(1, -(-(last - first) // 512))
        sampled = torch.arange(first + stride // 2, last, stride) - first
        for head in range(3 if last > first else 0):
            heads = query[row, head * group : (head + 1) * group].double() * scale
            values = unpacked(codes[seat, head, first:last], head_dim).double() + 0.5
            logits = heads @ rotation.double().T @ values.T * scales[seat, head, first:last].double()
            fixed = heads @ sinks[seat, head, :first].double().T
            total = fixed.exp().sum(1) + logits[:, sampled].exp().sum(1) * (last - first) / len(sampled)
            expected[row, head, first:last] = (logits.exp() / total[:, None]).sum(0)
    return expected


def unpacked(codes: Tensor, head_dim: int) -> Tensor:
    """Each coordinate's code, -2 to 1: [..., d]."""
    every = torch.cat([(codes.long() >> shift) & 3 for shift in (0, 2, 4, 6)], dim=-1)
    return (every - 4 * (every >= 2))[..., :head_dim]


def prompt_keys(head_dim: int, dtype: torch.dtype) -> Arguments:
    """Some channels are large in all keys, and some vary more."""
    generator = torch.Generator().manual_seed(head_dim)
    keys = torch.randn(2, 131, head_dim, generator=generator) * torch.rand(head_dim, generator=generator) * 4
    keys = (keys + 3 * torch.randn(head_dim, generator=generator)).to(dtype)
    return {
        "keys": keys,
        "means": keys.float().mean(dim=1),
        "rotation": Rotation.of(head_dim, CPU).matrix,
        "codes": torch.full((2, 140, -(-head_dim // 4)), 113, dtype=torch.uint8),
        "scales": torch.full((2, 140), math.nan, dtype=float16),
    }


def unusual_keys() -> Arguments:
    """Make the first and last two keys the mean, with scale 0, and one so long that its scale is bounded."""
    keys = torch.zeros(1, 3, 64)
    keys[0, 1] = 3e5 * torch.randn(64, generator=torch.Generator().manual_seed(0))
    return prompt_keys(64, float32) | {
        "keys": keys, "means": torch.zeros(1, 64),
        "codes": torch.zeros(1, 3, 16, dtype=torch.uint8), "scales": torch.full((1, 3), math.nan, dtype=float16),
    }  # fmt: skip


def leaving_keys(head_dim: int, dtype: torch.dtype) -> Arguments:
    """One token a lane in two layers of three heads; one lane has none."""
    generator = torch.Generator().manual_seed(head_dim)
    keys = torch.randn(4, 2, 3, head_dim, generator=generator).to(dtype)
    keys[1] = math.nan
    seats = seats_of(4, CPU)
    return {
        "keys": keys,
        "means": at_seats(torch.randn(4, 2, 3, head_dim, generator=generator), seats, math.nan),
        "rotation": Rotation.of(head_dim, CPU).matrix,
        "codes": torch.full((6, 2, 3, 40, -(-head_dim // 4)), 113, dtype=torch.uint8),
        "scales": torch.full((6, 2, 3, 40), math.nan, dtype=float16),
        "seats": seats,
        "positions": torch.tensor([7, -1, 0, 39]),
    }


def centred(keys: Tensor, means: Tensor, codes: Tensor, **_: Tensor) -> tuple[Tensor, Tensor]:
    """Keys less the mean of each position that is coded: [..., N, d]; and which those are."""
    found = torch.zeros(*codes.shape[:-1], keys.shape[-1], dtype=torch.float64)
    found[:, : keys.shape[1]] = keys.double() - means[:, None].double()
    return found, (torch.arange(codes.shape[1]) < keys.shape[1]).expand(codes.shape[:-1])


def centred_leaving(
    keys: Tensor, means: Tensor, codes: Tensor, seats: Tensor, positions: Tensor, **_: Tensor
) -> tuple[Tensor, Tensor]:
    found = torch.zeros(*codes.shape[:-1], keys.shape[-1], dtype=torch.float64)
    is_coded = torch.zeros(codes.shape[:-1], dtype=torch.bool)
    for lane, (seat, position) in enumerate(zip(seats.tolist(), positions.tolist(), strict=True)):
        if position >= 0:
            found[seat, :, :, position] = keys[lane].double() - means[seat].double()
            is_coded[seat, :, :, position] = True
    return found, is_coded


def agree_on_bits(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], arguments: Arguments) -> None:
    (codes, scales), (keys, is_coded) = found, expected
    assert torch.equal(codes[~is_coded], arguments["codes"][~is_coded])
    assert scales[~is_coded].isnan().all()
    rotated = keys[is_coded] @ arguments["rotation"].double().T
    square, scales = rotated.square().sum(-1), scales[is_coded].double()
    steps = rotated / (0.9957 * (square / rotated.shape[-1]).sqrt())[..., None].clamp(min=1e-30)
    every = unpacked(codes[is_coded], 4 * codes.shape[-1])
    # The bits of coordinates that there are none of are 0.
    assert (every[..., rotated.shape[-1] :] == 0).all()
    values = every[..., : rotated.shape[-1]]
    borders = torch.tensor([-1.0, 0.0, 1.0])
    is_clear = ((steps[..., None] - borders).abs() > NEAR).all(-1)
    assert torch.equal(values[is_clear], (steps[..., None] > borders).sum(-1)[is_clear] - 2)
    assert is_clear[square > 0].double().mean() > 0.9
    # The estimate of a key's product with itself is exact but for rounding: the interpreter cuts bfloat16 off.
    is_bounded = scales == torch.finfo(float16).max
    estimated = scales * (rotated * (values + 0.5)).sum(-1)
    torch.testing.assert_close(estimated[~is_bounded], square[~is_bounded], rtol=1e-2, atol=1e-6)
    assert torch.equal(is_bounded, square > 1e12)
    assert (scales[square == 0] == 0).all()


def sinks_of(head_dim: int, num_tokens: int, num_sinks: int, dtype: torch.dtype) -> Arguments:
    generator = torch.Generator().manual_seed(num_tokens)
    keys = torch.randn(3, num_tokens, head_dim, generator=generator) + torch.arange(3.0)[:, None, None]
    targets = {
        "means": torch.full((3, head_dim), math.nan),
        "sinks": torch.full((3, num_sinks, head_dim), math.nan),
    }
    return {"keys": keys.to(dtype), **targets}


def less_the_mean(keys: Tensor, means: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    mean = keys.double().mean(dim=1)
    return mean, keys[:, : sinks.shape[1]].double() - mean[:, None]


LONG = ((3, 2190), (2, 600))
# Some, none, and nothing to take from.
FEW = ((4, 4), (1, 60), (0, 0))
OPERATIONS = (
    Operation(
        package="gpu_worker.policies.bitkeys.bit_score",
        function="bit_score",
        exact=summed_weights,
        atol=1e-9,
        rtol=2e-4,
        strides={"query": 3, "codes": 2, "scales": 2, "sinks": 2},
        captured=True,
        cases=(
            *(
                case(bit_keys, *size, ((4, 281), (0, 290)), length, kind, bound=290)
                # Nothing is masked where an index is of whole tiles.
                for size, length, kind in (
                    ((4, 128), 512, bfloat16),
                    ((3, 64), 303, bfloat16),
                    ((16, 80), 303, float16),
                    ((1, 256), 303, float32),
                    ((7, 6), 303, float32),
                )
            ),
            # Some tiles a program, and fewer for the last.
            case(bit_keys, 4, 32, LONG, 2200, settings={"PROGRAMS": 12}),
            *(case(bit_keys, 3, 16, FEW, 70, bound=bound) for bound in (70, 60)),
            case(bit_keys, 2, 64, ((3, 40),), 40, factor=0),
        ),
    ),
    Operation(
        package="gpu_worker.policies.bitkeys.key_bits",
        function="centre",
        exact=less_the_mean,
        writes=("means", "sinks"),
        atol=1e-4,
        rtol=1e-4,
        strides={"keys": 3, "sinks": 2},
        cases=tuple(
            case(sinks_of, *size)
            for size in (
                (128, 1000, 4, bfloat16),
                (64, 65, 64, float32),
                (80, 64, 1, float16),
                (6, 1, 1, float32),
                (64, 70, 0, float32),
                (96, 9000, 3, bfloat16),
            )
        ),
    ),
    Operation(
        package="gpu_worker.policies.bitkeys.key_bits",
        function="code_prompt",
        exact=centred,
        agree=agree_on_bits,
        writes=("codes", "scales"),
        strides={"keys": 3, "codes": 2, "scales": 1},
        cases=(
            # A program has one tile, or all.
            *(
                case(prompt_keys, *size, settings={"PROGRAMS": programs})
                for size in (
                    (128, bfloat16),
                    (64, float32),
                    (80, float16),
                    (256, bfloat16),
                    (160, float32),
                    (6, float32),
                )
                for programs in (264, 2)
            ),
            case(unusual_keys),
        ),
    ),
    Operation(
        package="gpu_worker.policies.bitkeys.key_bits",
        function="code_leaving",
        exact=centred_leaving,
        agree=agree_on_bits,
        writes=("codes", "scales"),
        strides={"keys": 4, "means": 3, "codes": 4, "scales": 3},
        captured=True,
        cases=tuple(case(leaving_keys, *kind) for kind in ((128, bfloat16), (96, float16), (64, float32))),
    ),
)
