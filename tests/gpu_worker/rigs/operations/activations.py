"""Operations of a layer on its rows, on pieces of its attention, and on logits."""

from __future__ import annotations

import math

import numpy as np
import torch
from kernel_contract import Arguments, Operation, case
from kernel_rig import assert_rounded
from torch import Tensor, bfloat16, float16, float32

# So large that small rows are held up by it.
EPS = 1e-3


def gates(num_rows: int, width: int, dtype: torch.dtype) -> Arguments:
    generator = torch.Generator().manual_seed(width)
    return {"gate_up": (6 * torch.randn(num_rows, 2 * width, generator=generator)).to(dtype)}


def gated(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.double().chunk(2, dim=1)
    return gate / (1 + (-gate).exp()) * up


def rows_to_norm(
    num_rows: int,
    width: int,
    dtype: torch.dtype,
    adds: int,
    factor: float = 3.0,
    weight_type: torch.dtype | None = None,
) -> Arguments:
    """adds: 0 nothing, 1 rows, 2 rows that are normed first. weight_type: None for that of the rows."""
    generator = torch.Generator().manual_seed(width)
    hidden, added = ((factor * torch.randn(num_rows, width, generator=generator)).to(dtype) for _ in range(2))
    hidden[:1] *= 0.01 if factor < 100 else 1.0
    weight, added_weight = torch.randn(2, width, generator=generator).to(weight_type or dtype)
    more = {"added": added, "added_weight": added_weight}
    return {"hidden": hidden, "weight": weight, "eps": EPS} | dict(list(more.items())[:adds])


def norm(rows: Tensor, weight: Tensor) -> Tensor:
    wide = rows.double()
    return wide / (wide.square().mean(dim=1, keepdim=True) + EPS).sqrt() * weight.double()


def addend(arguments: Arguments) -> Tensor:
    if "added" not in arguments:
        return torch.zeros_like(arguments["hidden"].double())
    if "added_weight" not in arguments:
        return arguments["added"].double()
    return norm(arguments["added"], arguments["added_weight"])


def added_and_normed(**arguments: Tensor) -> tuple[Tensor, ...]:
    total = arguments["hidden"] + addend(arguments)
    return (total, norm(total, arguments["weight"])) if "weight" in arguments else (total,)


def agree_on_norms(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], arguments: Arguments) -> None:
    summed, total, dtype = found[0], expected[0], arguments["hidden"].dtype
    # Rounded twice: as the norm, and as the sum.
    bound = max(torch.finfo(dtype).eps, 1e-6) * (addend(arguments).abs() + total.abs()) + 1e-6
    assert summed.dtype == dtype
    assert ((summed - total).abs() <= bound).all()
    if "weight" in arguments:
        assert_rounded(found[1], norm(summed, arguments["weight"]).float(), dtype)


def without_weight(*values: object) -> Arguments:
    arguments = rows_to_norm(*values, adds=2)  # type: ignore[arg-type, misc]
    del arguments["weight"]
    return arguments


def pieces(
    num_tokens: int, num_heads: int, head_dim: int, sizes: tuple[int, ...], dtype: torch.dtype
) -> Arguments:
    generator = torch.Generator().manual_seed(num_tokens)
    scores = 20 * torch.randn(num_heads, num_tokens, sum(sizes), generator=generator)
    values = torch.randn(num_heads, sum(sizes), head_dim, generator=generator)
    parts = zip(scores.split(sizes, dim=2), values.split(sizes, dim=1), strict=True)
    outputs = tuple((own.softmax(dim=2) @ value).transpose(0, 1).to(dtype) for own, value in parts)
    log_sums = torch.stack([own.logsumexp(dim=2) for own in scores.split(sizes, dim=2)])
    return {"log_sums": log_sums, "outputs": outputs}


def joined(log_sums: Tensor, outputs: tuple[Tensor, ...]) -> Tensor:
    shares = log_sums.double().softmax(dim=0).transpose(1, 2)[..., None]
    return torch.stack([share * output.double() for share, output in zip(shares, outputs, strict=True)]).sum(
        0
    )


def past_and_own(
    num_tokens: int, group: int, head_dim: int, num_pieces: int, dtype: torch.dtype
) -> Arguments:
    """A group's queries of a KV head lie one head's behind another's."""
    generator = torch.Generator().manual_seed(num_tokens)
    num_heads = 2 * group
    return {
        "log_sums": 20 * torch.randn(num_pieces, 2, group * num_tokens, generator=generator),
        "outputs": torch.randn(num_pieces, group * num_tokens, 2, head_dim, generator=generator).to(dtype),
        "own_sums": 20 * torch.randn(num_heads, num_tokens, generator=generator),
        "own": torch.randn(num_tokens, num_heads, head_dim, generator=generator).to(dtype),
    }


def joined_past(log_sums: Tensor, outputs: Tensor, own_sums: Tensor, own: Tensor) -> Tensor:
    num_tokens, num_heads, _ = own.shape
    group = num_heads // 2
    past_sums = log_sums.unflatten(2, (group, num_tokens)).flatten(1, 2)
    past = outputs.unflatten(1, (group, num_tokens)).movedim(3, 1).flatten(1, 2).transpose(1, 2)
    return joined(torch.cat([past_sums, own_sums[None]]), (*past, own))


def masked_logits(vocab_size: int, rows: tuple[int, ...] = (4, 0, 2)) -> Arguments:
    """Words have bits behind the vocabulary, and may allow what is not a number."""
    generator = torch.Generator().manual_seed(vocab_size)
    size = len(rows), -(-vocab_size // 32)
    logits = torch.randn(5, vocab_size, generator=generator)
    logits[:, ::7] = math.nan
    logits[:, 3::11] = math.inf
    return {
        "logits": logits,
        "rows": torch.tensor(rows, dtype=torch.int32),
        "allowed": torch.randint(-(2**31), 2**31, size, generator=generator, dtype=torch.int64).int(),
    }


def kept(logits: Tensor, rows: Tensor, allowed: Tensor) -> Tensor:
    """Set what is not allowed to -inf; but what is not a number stays, to be found."""
    bits = np.unpackbits(allowed.numpy().view(np.uint8), axis=1, bitorder="little")
    is_allowed = torch.from_numpy(bits[:, : logits.shape[1]]).bool() | ~logits[rows.long()].isfinite()
    logits[rows.long()] = logits[rows.long()].masked_fill(~is_allowed, -math.inf)
    return logits


def projected(
    heads: tuple[int, int, int, int], interleaved: bool, has_norms: bool, dtype: torch.dtype = bfloat16,
    num_tokens: int = 5,
) -> Arguments:  # fmt: skip
    """heads: queries, keys, elements of each, and those that are turned. The table is NaN where no position is."""
    num_heads, num_kv_heads, head_dim, rotary_dim = heads
    generator = torch.Generator().manual_seed(num_tokens)
    positions = torch.randint(0, 60, (num_tokens,), generator=generator)
    positions[:1] = 59
    table = torch.full((60, 2, rotary_dim), math.nan)
    table[positions] = torch.randn(num_tokens, 2, rotary_dim, generator=generator)
    weights = (1 + 0.3 * torch.randn(2, head_dim, generator=generator)).to(dtype)
    return {
        "qkv": 3
        * torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, generator=generator).to(dtype),
        **{"table": table.to(dtype), "positions": positions},
        **{"num_heads": num_heads, "num_kv_heads": num_kv_heads, "interleaved": interleaved},
        **{
            "q_norm": weights[0] if has_norms else None,
            "k_norm": weights[1] if has_norms else None,
            "eps": 1e-4,
        },
    }


def one_rounding(interleaved: bool) -> Arguments:
    """1.5 * (1 + 2^-8) - 1.5 is lost if the product is rounded to bf16 before the sum."""
    qkv = torch.tensor([[1.5, 1.5, 0, 0, 0, 0]], dtype=bfloat16)
    table = torch.tensor([[[1 + 2**-7, 1.0], [-1.0, 1.0]]], dtype=bfloat16)
    heads = {"num_heads": 1, "num_kv_heads": 1, "interleaved": interleaved}
    return {"qkv": qkv, "table": table, "positions": torch.zeros(1, dtype=torch.int64), **heads}


HEADS = (
    ((32, 8, 128, 128), False), ((3, 3, 96, 96), False), ((14, 2, 64, 64), False), ((16, 1, 128, 64), False),
    ((4, 1, 20, 20), False), ((6, 2, 64, 64), True), ((14, 2, 64, 32), True), ((3, 1, 96, 48), True),
    ((4, 1, 12, 6), True),
    # as layers without RoPE are computed
    ((8, 2, 64, 2), False),
)  # fmt: skip
TYPES = (float32, float16, bfloat16)
NORMED_ROWS = ((1, 1, float32), (2, 64, float16), (5, 65, bfloat16), (2, 2560, bfloat16), (5, 65, float32))
OPERATIONS = (
    Operation(
        package="gpu_worker.kernels.silu_mul",
        function="silu_mul",
        exact=gated,
        rounds_once=True,
        strides={"gate_up": 1},
        lanes=("gate_up",),
        captured=True,
        cases=tuple(
            case(gates, *size, kind) for size in ((2, 1025), (1, 1), (3, 1024), (2, 0)) for kind in TYPES
        ),
    ),
    Operation(
        package="gpu_worker.kernels.rms_norm",
        function="rms_norm",
        exact=added_and_normed,
        agree=agree_on_norms,
        strides={"hidden": 1, "added": 1},
        lanes=("hidden", "added"),
        captured=True,
        cases=(
            *(case(rows_to_norm, *size, adds=adds) for adds in (2, 1, 0) for size in NORMED_ROWS),
            *(case(rows_to_norm, 5, 65, kind, 2, weight_type=float32) for kind in (float16, bfloat16)),
            # Their squares are no numbers of 16 bits.
            case(rows_to_norm, 1, 4096, float16, 0, factor=300.0),
        ),
    ),
    Operation(
        package="gpu_worker.kernels.rms_norm",
        function="add_normed",
        exact=added_and_normed,
        agree=agree_on_norms,
        strides={"hidden": 1, "added": 1},
        lanes=("hidden", "added"),
        captured=True,
        cases=tuple(case(without_weight, *size) for size in NORMED_ROWS),
    ),
    Operation(
        package="gpu_worker.kernels.rope",
        function="rope",
        rounds_once=True,
        strides={"qkv": 1, "positions": 1},
        lanes=("qkv", "positions"),
        captured=True,
        cases=(
            *(case(projected, *heads, has_norms) for heads in HEADS for has_norms in (False, True)),
            *(
                case(projected, *HEADS[place], True, kind, num_tokens)
                for place, num_tokens in ((2, 33), (1, 1), (6, 1))
                for kind in (float32, float16)
            ),
            *(case(one_rounding, interleaved) for interleaved in (False, True)),
        ),
    ),
    Operation(
        package="gpu_worker.kernels.join_pieces",
        function="join_pieces",
        exact=joined,
        rounds_once=True,
        strides={f"outputs.{place}": 3 for place in range(5)} | {"log_sums": 3},
        cases=tuple(
            case(pieces, *size, sizes, kind)
            for size, kind in (
                ((7, 3, 96), bfloat16),
                ((1, 1, 128), float32),
                ((5, 4, 64), float16),
                ((0, 2, 64), float32),
            )
            for sizes in ((3, 700, 5), (1, 1), (64, 1, 2, 9, 30))
        ),
    ),
    Operation(
        package="gpu_worker.kernels.join_pieces",
        function="join_past",
        exact=joined_past,
        rounds_once=True,
        strides={"outputs": 4, "own": 3},
        cases=tuple(
            case(past_and_own, *size, num_pieces, kind)
            for size in ((7, 3, 96), (1, 1, 128), (37, 4, 64))
            for num_pieces, kind in ((1, float32), (3, bfloat16))
        ),
    ),
    Operation(
        package="gpu_worker.kernels.keep_allowed",
        function="keep_allowed",
        exact=kept,
        writes=("logits",),
        strides={"logits": 1, "allowed": 1, "rows": 1},
        lanes=("rows", "allowed"),
        poison=7.0,
        repeats=False,
        captured=True,
        cases=(
            *(case(masked_logits, size) for size in (97, 1, 31, 32, 33, 1025, 49152, 128256)),
            case(masked_logits, 40, ()),
        ),
    ),
)
