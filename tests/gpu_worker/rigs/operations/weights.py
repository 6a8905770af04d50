"""Operations that return attention weights: of a step's slots, and of a prompt's tokens."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from kernel_contract import Arguments, Operation, Refusal, case, split
from torch import Tensor, bfloat16, float16, float32

from gpu_worker.kernels.attention.reference import BLOCK_SIZE


def filled_slots(
    group: int,
    lengths: list[list[int]],
    longest: int,
    head_dim: int = 64,
    dtype: torch.dtype = float32,
    factor: float = 1.0,
) -> Arguments:
    """A pool that holds NaN wherever no slot is filled; blocks in no order, and seats of which one is free."""
    batch, num_kv_heads = len(lengths), len(lengths[0])
    generator = torch.Generator().manual_seed(group + head_dim)
    num_blocks = max(1, -(-max(map(max, lengths)) // BLOCK_SIZE))
    query = torch.randn(batch, num_kv_heads * group, head_dim, generator=generator).to(dtype) * factor
    blocks = torch.randperm((batch + 1) * num_kv_heads * num_blocks, generator=generator)
    tables = blocks.view(batch + 1, num_kv_heads, num_blocks)
    pool = torch.full((blocks.numel() * BLOCK_SIZE, 2 * head_dim), math.nan, dtype=dtype)
    seats = torch.arange(batch, 0, -1)
    for row, of_heads in enumerate(lengths):
        for head, length in enumerate(of_heads):
            slots = torch.arange(length)
            places = tables[seats[row], head][slots // BLOCK_SIZE] * BLOCK_SIZE + slots % BLOCK_SIZE
            pool[places, :head_dim] = torch.randn(length, head_dim, generator=generator).to(dtype)
    where = {"block_tables": tables, "seats": seats, "lengths": torch.tensor(lengths)}
    return {"query": query, "pool": pool, **where, "scale": 0.2, "longest": longest}


def mean_weights(
    query: Tensor,
    pool: Tensor,
    block_tables: Tensor,
    seats: Tensor,
    lengths: Tensor,
    scale: float,
    longest: int,
) -> Tensor:
    """The mean over a group's heads of each one's softmax; 0 beyond a head's slots."""
    expected = torch.zeros(*lengths.shape, longest, dtype=torch.float64)
    for (row, head), length in zip(
        torch.cartesian_prod(*map(torch.arange, lengths.shape)).tolist(),
        lengths.flatten().tolist(),
        strict=True,
    ):
        slots = torch.arange(length)
        places = block_tables[seats[row], head][slots // BLOCK_SIZE] * BLOCK_SIZE + slots % BLOCK_SIZE
        keys = pool[places, : query.shape[2]].double()
        heads = query[row].double().chunk(lengths.shape[1])[head]
        expected[row, head, :length] = (heads @ keys.T * scale).softmax(1).mean(0)
    return expected


def last_queries(
    group: int,
    width: int,
    num_tokens: int,
    head_dim: int = 64,
    dtype: torch.dtype = float32,
    told: tuple[str, ...] = ("positions", "shares"),
    factor: float = 1.0,
) -> Arguments:
    """told: what is given; otherwise queries are the last tokens', and their shares equal."""
    generator = torch.Generator().manual_seed(group + head_dim + width)
    num_heads = 2 * group
    keys = torch.randn(2, num_tokens, head_dim, generator=generator).to(dtype)
    queries = factor * torch.randn(num_heads, width, head_dim, generator=generator).to(dtype)
    positions = torch.arange(num_tokens - width, num_tokens).repeat(num_heads, 1)
    shares = torch.rand(num_heads, 1, generator=generator).repeat(1, width)
    where = {"positions": positions, "shares": shares}
    where = {name: each if name in told else None for name, each in where.items()}
    return {"queries": queries, "keys": keys, **where, "scale": 0.2 / math.sqrt(factor)}


def queries_anywhere(group: int, width: int, num_tokens: int, order: str) -> Arguments:
    """Heads have queries of their own, some fewer than others: the rest is NaN, and so are their shares."""
    arguments = last_queries(group, width, num_tokens)
    generator = torch.Generator().manual_seed(2)
    positions = torch.randint(0, num_tokens, (2 * group, width), generator=generator)
    if order != "none":
        positions = positions.sort(dim=1, descending=order == "descending").values
    positions[1, width // 2 :], positions[2 * group // 4], positions[-1, ::3] = -1, -1, -1
    if order == "nothing":
        positions[:group] = -1
    shares = torch.rand(positions.shape, generator=generator).masked_fill(positions < 0, math.nan)
    queries = arguments["queries"].masked_fill((positions < 0)[..., None], math.nan)
    return arguments | {"queries": queries, "positions": positions, "shares": shares}


def met_in_parts() -> dict[str, object]:
    """Settings by which many tiles of queries are looked at some at a time."""
    from gpu_worker.kernels.observed_weight import kernel

    return {"REACH_TILE": 2, "WIDE": replace(kernel.WIDE, met=16)}


KINDS = ((8, float16), (64, bfloat16), (96, bfloat16), (128, float16))
OPERATIONS = (
    Operation(
        package="gpu_worker.kernels.slot_weights",
        function="slot_weights",
        exact=mean_weights,
        atol=1e-6,
        rtol=1e-4,
        strides={"query": 2, "block_tables": 3, "lengths": 2},
        lanes=("query", "seats", "lengths"),
        captured=True,
        cases=(
            *(
                case(filled_slots, group, [[1, 64], [65, 130], [0, 7]], 130, settings=split(processors))
                for group in (3, 1, 8, 16)
                for processors in (1, 2, 132)
            ),
            *(case(filled_slots, 4, [[100, 33]], 128, *kind) for kind in KINDS),
            # A split far below the others, whichever comes first.
            *(case(filled_slots, 4, [[300, 170]], 300, factor=60, settings=split(n)) for n in (1, 2, 132)),
            *(case(filled_slots, 3, [[70, 12]], longest) for longest in (70, 71, 190)),
        ),
    ),
    Operation(
        package="gpu_worker.kernels.observed_weight",
        function="observed_weight",
        atol=2e-6,
        rtol=2e-4,
        strides={"queries": 2, "keys": 2, "positions": 2, "shares": 2},
        cases=(
            *(
                case(last_queries, group, 11, 150, settings=split(processors))
                for group in (3, 1, 16)
                for processors in (1, 2, 132)
            ),
            *(case(last_queries, 4, 33, 200, *kind) for kind in KINDS),
            *(
                case(last_queries, 4, width, 150, told=told)
                for width in (1, 37)
                for told in ((), ("positions",))
            ),
            # Every tile of tokens has queries that see none of it, a part, and all of it.
            case(last_queries, 1, 270, 270, 16, bfloat16),
            *(
                case(last_queries, group, *size)
                for group in (1, 3)
                for size in ((1, 1), (1, 300), (7, 7), (0, 9))
            ),
            *(
                case(queries_anywhere, 4, 40, 210, order, settings=split(processors))
                for order in ("ascending", "none", "descending", "nothing")
                for processors in (1, 2, 132)
            ),
            # Splits far below the others, whichever come first.
            *(case(last_queries, 4, 8, 300, factor=16.0, settings=split(n)) for n in (1, 2, 132)),
            case(last_queries, 1, 100, 130, settings=met_in_parts()),
        ),
        refusals=(
            Refusal("cast one", lambda a: {"queries": a["queries"].half()}, kernel_only=True),
            Refusal("side by side", lambda a: {"keys": a["keys"].mT.contiguous().mT}, kernel_only=True),
            Refusal(
                "do not fit keys",
                lambda a: {name: a[name][:3] for name in ("queries", "positions", "shares")},
                kernel_only=True,
            ),
            Refusal("int64 positions", lambda a: {"positions": a["positions"].int()}, kernel_only=True),
            Refusal("one for each query", lambda a: {"positions": a["positions"][:, 1:]}, kernel_only=True),
        ),
    ),
)
