"""A step's attention over listed slots and over block tables."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from kernel_contract import Arguments, Operation, Refusal, case, split
from torch import Tensor, bfloat16, float16, float32

from gpu_worker.kernels.attention.reference import BLOCK_SIZE, Rest

NUM_SLOTS = 6 * BLOCK_SIZE
# More of them than rows, and in another order.
NUM_SEATS, SEATS = 5, [3, 0]
# Not a slot, a block or a row.
NOWHERE = 10**9
TOLERANCES = {float32: (2e-5, 2e-5), float16: (1e-3, 2e-3), bfloat16: (4e-3, 8e-3)}
Lengths = tuple[tuple[int, int], tuple[int, int]]


def seated(rows: Tensor, poison: float = NOWHERE) -> Tensor:
    at_seats = torch.full((NUM_SEATS, *rows.shape[1:]), poison, dtype=rows.dtype)
    at_seats[SEATS] = rows
    return at_seats


def query_and_pool(group: int, head_dim: int, dtype: torch.dtype, attended: Tensor) -> Arguments:
    """A query of norm enough to make peaks, and a pool that is NaN but for the attended slots."""
    generator = torch.Generator().manual_seed(group + head_dim)
    query = 2 * torch.randn(2, 2 * group, head_dim, generator=generator)
    pool = torch.full((NUM_SLOTS, 2 * head_dim), math.nan)
    rows = torch.randn(NUM_SLOTS, 2 * head_dim, generator=generator)
    pool[attended] = rows[attended]
    return {
        "query": query.to(dtype),
        "pool": pool.to(dtype),
        "seats": torch.tensor(SEATS),
        "scale": head_dim**-0.5,
    }


def random_slots(lengths: Lengths, width: int) -> Tensor:
    """Different slots in random columns, -1 in the others."""
    generator = torch.Generator().manual_seed(1)
    slots = torch.full((2, 2, width), -1, dtype=torch.int32)
    for row, head in torch.cartesian_prod(torch.arange(2), torch.arange(2)).tolist():
        columns = torch.randperm(width, generator=generator)[: lengths[row][head]]
        slots[row, head, columns] = torch.randperm(NUM_SLOTS, generator=generator)[: len(columns)].int()
    return slots


def listed(
    group: int, head_dim: int, dtype: torch.dtype, slots: Tensor, num_fixed: int, rest: str = ""
) -> Arguments:
    """rest: rows that stand in for others: of "some" heads, or of none of them: the weight is -inf."""
    arguments = query_and_pool(group, head_dim, dtype, slots[slots >= 0].long())
    generator = torch.Generator().manual_seed(2)
    weights = torch.randn(2, 2 * group, generator=generator)
    weights[0, ::2] = -math.inf
    if rest == "none":
        weights[:] = -math.inf
    row = Rest(torch.randn(2, 2 * group, head_dim, generator=generator), weights)
    lists = {"fixed": seated(slots[..., :num_fixed]), "selected": slots[..., num_fixed:].contiguous()}
    return arguments | lists | {"rest": row if rest else None}


def lists(
    group: int,
    head_dim: int,
    dtype: torch.dtype,
    lengths: Lengths,
    width: int,
    num_fixed: int,
    rest: str = "",
) -> Arguments:
    return listed(group, head_dim, dtype, random_slots(lengths, width), num_fixed, rest)


def cut_lists(length: int) -> Arguments:
    slots = random_slots(((length, 1), (190, length)), 192)[..., :length]
    slots[..., 0] = 7
    return listed(2, 64, float32, slots, length // 2)


def long_runs_of_pads() -> Arguments:
    slots = torch.full((2, 2, 192), -1, dtype=torch.int32)
    slots[0, 0, 191], slots[0, 1, 0], slots[1, 0, 70], slots[1, 1, 5], slots[1, 1, 150] = 3, 4, 5, 6, 7
    return listed(4, 64, float32, slots, 100)


def extreme_scores(sign: int) -> Arguments:
    """Equal keys, so that every value weighs alike."""
    slots = torch.arange(160, dtype=torch.int32).repeat(2, 2, 1)
    arguments = listed(1, 64, float32, slots, 37)
    arguments["pool"][:160] = torch.cat(
        [torch.full((160, 64), 300.0), torch.arange(160.0)[:, None].expand(-1, 64)], 1
    )
    return arguments | {"query": torch.full((2, 2, 64), sign * 300.0), "scale": 1.0}


def attend(
    query: Tensor, pool: Tensor, held: Callable[[int, int], Tensor], scale: float, more: Rest | None = None,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """One query head at a time, in float64. held: slots of a row's KV head. more: a row of each query head."""
    output = torch.zeros(query.shape, dtype=torch.float64)
    group = query.shape[1] // 2
    query, pool = query.double(), pool.double()
    for row, head in torch.cartesian_prod(*map(torch.arange, query.shape[:2])).tolist():
        slots = held(row, head // group)
        keys, values = pool[slots].split(query.shape[2], dim=1)
        scores = keys @ query[row, head] * scale
        if bias is not None:
            scores += bias[SEATS[row], head // group, : len(slots)]
        if more is not None and more.log_weights[row, head] > -math.inf:
            scores = torch.cat([scores, more.log_weights[row, head, None].double()])
            values = torch.cat([values, more.values[row, head, None].double()])
        output[row, head] = scores.softmax(0) @ values
    return output


def attend_lists(
    query: Tensor,
    pool: Tensor,
    seats: Tensor,
    scale: float,
    fixed: Tensor,
    selected: Tensor,
    rest: Rest | None,
) -> Tensor:
    both = torch.cat([fixed[seats], selected], dim=2)
    return attend(
        query, pool, lambda row, head: both[row, head][both[row, head] >= 0].long(), scale, rest, None
    )


def tables(
    group: int, head_dim: int, dtype: torch.dtype, lengths: Lengths, longest: int, bias: str = "",
    kind: torch.dtype = torch.int64,
) -> Arguments:  # fmt: skip
    """bias: "random", or "nothing" of the first 100 slots: -inf. Beyond the lengths there is no block, and NaN."""
    blocks = torch.tensor([[[5, 1, 3], [0, 2, 4]], [[3, 0, 1], [2, 5, 0]]])
    long = torch.tensor(lengths)
    blocks[torch.arange(3) * BLOCK_SIZE >= long[..., None]] = NOWHERE
    attended = torch.cat([held_blocks(blocks, long, row, head) for row in range(2) for head in range(2)])
    added = 2 * torch.randn(2, 2, longest, generator=torch.Generator().manual_seed(2))
    if bias == "nothing":
        added = torch.zeros_like(added)
        added[..., :100] = -math.inf
    added = seated(added.masked_fill(torch.arange(longest) >= long[..., None], math.nan), math.nan)
    arguments = query_and_pool(group, head_dim, dtype, attended)
    more = {"lengths": long, "longest": longest, "bias": added if bias else None}
    return arguments | {"block_tables": seated(blocks).to(kind)} | more


def held_blocks(blocks: Tensor, lengths: Tensor, row: int, head: int) -> Tensor:
    places = torch.arange(int(lengths[row, head]))
    return blocks[row, head, places // BLOCK_SIZE].long() * BLOCK_SIZE + places % BLOCK_SIZE


def attend_tables(
    query: Tensor, pool: Tensor, seats: Tensor, scale: float, lengths: Tensor, longest: int, bias: Tensor | None,
    block_tables: Tensor,
) -> Tensor:  # fmt: skip
    blocks = block_tables[seats]
    return attend(query, pool, lambda row, head: held_blocks(blocks, lengths, row, head), scale, bias=bias)


def agree_by_type(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], arguments: Arguments) -> None:
    atol, rtol = TOLERANCES[arguments["query"].dtype]
    assert found[0].dtype == arguments["query"].dtype
    torch.testing.assert_close(found[0].double(), expected[0], atol=atol, rtol=rtol)
    # A head of nothing gets zeros: a captured batch is padded with such.
    assert not found[0][(expected[0] == 0).all(-1)].any()


SHAPES = ((1, 128, bfloat16), (3, 96, bfloat16), (16, 128, bfloat16), (8, 64, float16), (7, 96, float32))
PLAIN = (2, 64, float32)
BLOCKS = (
    *(case(tables, *shape, ((1, 64), (65, 130)), 192) for shape in SHAPES),
    # Heads of one length.
    *(
        case(tables, *shape, ((n, n), (m, m)), max(n, m))
        for shape in SHAPES
        for n, m in ((130, 0), (64, 1), (129, 129))
    ),
    # Every cut gives the same.
    *(
        case(tables, *PLAIN, lengths, longest, settings=split(processors))
        for n in (1, 64, 65, 192)
        for lengths, longest in ((((n, 1), (192, n)), 192), (((n, 1), (n, n)), n))
        for processors in (1, 2, 132)
    ),
    *(
        case(tables, 3, 96, float32, lengths, 164, bias, settings=split(processors))
        for lengths, bias in (
            (((1, 64), (130, 63)), "random"),
            (((101, 164), (130, 130)), "nothing"),
            (((0, 0), (0, 1)), "random"),
        )
        for processors in (1, 2, 132)
    ),
    case(tables, 4, 64, float32, ((0, 0), (0, 1)), 128),
    case(tables, 3, 64, float32, ((70, 70), (133, 133)), 133, kind=torch.int32),
)
REFUSALS = (
    ("cast the query", lambda a: {"query": a["query"].half()}),
    ("contiguous", lambda a: {"query": a["query"].mT.contiguous().mT}),
    ("contiguous", lambda a: {"pool": a["pool"].T.contiguous().T}),
    (r"not K\|V of 64", lambda a: {"pool": a["pool"][:, :96]}),
    ("less than 2", lambda a: {"pool": a["pool"][:1].expand(2**31, -1)}),
    ("as int32", lambda a: {"fixed": a["fixed"].long()}),
    ("as int32", lambda a: {"selected": a["selected"].long()}),
    ("2 contiguous int64", lambda a: {"seats": a["seats"].int()}),
    ("2 contiguous int64", lambda a: {"seats": a["seats"][:1]}),
    ("2 contiguous int64", lambda a: {"seats": torch.stack([a["seats"]] * 2, dim=1)[:, 0]}),
    ("does not fit", lambda a: {"selected": a["selected"][:, :1]}),
)
STRIDES = {"query": 2, "block_tables": 3, "lengths": 2, "bias": 3}
OPERATIONS = (
    Operation(
        package="gpu_worker.kernels.attention",
        function="attend_slots",
        exact=attend_lists,
        agree=agree_by_type,
        strides={"query": 2, "fixed": 3, "selected": 3},
        captured=True,
        cases=(
            case(lists, *PLAIN, ((70, 133), (1, 64)), 140, 45),
            *(case(lists, *shape, ((1, 64), (129, 63)), 130, 37) for shape in SHAPES),
            *(case(cut_lists, length, settings=split(n)) for length in (1, 64, 65, 192) for n in (1, 2, 132)),
            *(case(lists, *PLAIN, ((n, n), (n, n)), n, fixed) for n, fixed in ((0, 0), (65, 0), (65, 65))),
            *(case(long_runs_of_pads, settings=split(n)) for n in (1, 2, 132)),
            *(case(lists, *PLAIN, ((0, 0), (0, 1)), 130, 37, settings=split(n)) for n in (1, 2, 132)),
            *(case(extreme_scores, sign, settings=split(n)) for sign in (1, -1) for n in (1, 2, 132)),
            *(case(lists, 3, 48, float32, ((60, 1), (0, 33)), 70, 37, rest) for rest in ("some", "none")),
        ),
        refusals=tuple(Refusal(*each, kernel_only=True) for each in REFUSALS),
    ),
    Operation(
        package="gpu_worker.kernels.attention",
        function="attend_blocks",
        exact=attend_tables,
        agree=agree_by_type,
        strides=STRIDES,
        captured=True,
        cases=BLOCKS,
        refusals=tuple(
            Refusal("192 float32", lambda _, bias=bias: {"bias": bias}, kernel_only=True)
            for bias in (torch.zeros(NUM_SEATS, 2, 99), torch.zeros(NUM_SEATS, 2, 192).double())
        ),
    ),
    Operation(
        package="gpu_worker.kernels.attention",
        function="attend_blocks_naive",
        kernel="reference",
        exact=attend_tables,
        agree=agree_by_type,
        strides=STRIDES,
        cases=tuple(each for each in BLOCKS if not each.settings),
    ),
)
