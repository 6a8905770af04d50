"""ProtoKV's operations: means of groups, sums of hash buckets and of chunks, and how far a key turns from its chunk."""

from __future__ import annotations

import torch
from kernel_contract import Arguments, Operation, Refusal, case
from torch import Tensor, bfloat16, float16, float32, int32, int64

from gpu_worker.policies.protokv.hash_buckets import RandomFeatures


def votes(num_heads: int, num_tokens: int, num_groups: int, dtype: torch.dtype) -> Arguments:
    generator = torch.Generator().manual_seed(num_tokens)
    shares = (3 * torch.randn(num_heads, num_tokens, generator=generator)).softmax(1)
    labels = torch.randint(0, num_groups, (num_heads, num_tokens), generator=generator).to(dtype)
    return {"votes": shares, "labels": labels, "num_groups": num_groups}


def large_and_small_votes() -> Arguments:
    given = torch.tensor([[16000.0, 3e-9, 3e-9, 300, 0, 1e-30]])
    return {"votes": given, "labels": torch.tensor([[0, 1, 1, 0, 2, 2]]), "num_groups": 4}


def drawn(num_heads: int, num_rows: int, width: int, dtype: torch.dtype = float32) -> Tensor:
    generator = torch.Generator().manual_seed(num_rows + width)
    return torch.randn(num_heads, num_rows, width, generator=generator).to(dtype)


def hashed(
    num_heads: int,
    num_rows: int,
    width: int,
    num_buckets: int,
    dtype: torch.dtype = float32,
    factor: float = 1.0,
) -> Arguments:
    keys = factor * drawn(num_heads, num_rows, width, dtype)
    return {"keys": keys, "features": RandomFeatures.draw(keys, num_buckets, 1.0, num_rows)}


def themes(
    num_heads: int, num_rows: int, width: int, num_chunks: int, dtype: torch.dtype = float32
) -> Arguments:
    generator = torch.Generator().manual_seed(num_rows + width)
    of_ten = torch.randn(num_heads, num_rows // 10 + 1, width, generator=generator)
    keys = 3 * of_ten[:, torch.arange(num_rows) // 10] + drawn(num_heads, num_rows, width)
    return {"keys": keys.to(dtype), "num_chunks": num_chunks}


def with_members(*size: int, dtype: torch.dtype = float32, members: bool = True) -> Arguments:
    """The first chunk of the first head has no members."""
    arguments = themes(*size, dtype=dtype)
    shape, num_chunks = arguments["keys"].shape[:2], arguments["num_chunks"]
    is_member = torch.randn(shape, generator=torch.Generator().manual_seed(0)) > -1
    is_member[0, : shape[1] // num_chunks] = False
    return arguments | {"is_member": is_member if members else None}


CHUNKS = (
    (3, 131, 16, 66),
    (3, 1, 16, 1),
    (3, 7, 16, 4),
    (3, 64, 16, 1),
    (3, 65, 16, 1),
    (3, 300, 16, 2),
    (3, 260, 16, 3),
)
WIDTHS = ((5, float32), (64, bfloat16), (96, float16), (128, float32), (600, float32))
TOO_MANY = tuple(
    Refusal(f"131 keys make no {number} chunks", lambda _, number=number: {"num_chunks": number})
    for number in (0, 132)
)
OPERATIONS = (
    Operation(
        package="gpu_worker.policies.protokv.group_means",
        function="group_means",
        atol=1e-12,
        rtol=1e-5,
        strides={"votes": 1, "labels": 1},
        lanes=("votes", "labels"),
        cases=(
            *(
                case(votes, *size, kind, settings={"TILE": 64})
                for size in ((3, 64, 64), (1, 1, 1), (2, 65, 7), (8, 700, 37), (1, 300, 671))
                for kind in (int32, int64)
            ),
            case(large_and_small_votes),
        ),
    ),
    Operation(
        package="gpu_worker.policies.protokv.hash_buckets",
        function="bucket_sums",
        atol=1e-4,
        rtol=1e-5,
        strides={"keys": 2, "features.weights": 3, "features.phases": 3},
        cases=(
            *(case(hashed, 2, 48, width, 16, kind) for width, kind in WIDTHS[:4]),
            *(
                case(hashed, 3, rows, 16, buckets)
                for rows, buckets in ((0, 5), (1, 1), (3, 16), (70, 2), (20, 33))
            ),
            case(hashed, 2, 50, 16, 6, settings={"TILE_ELEMENTS": 256}),
            case(hashed, 2, 30, 16, 4, factor=0.0),
            # So many keys go to the reference.
            case(hashed, 2, 30, 16, 4, settings={"MOST_HASHES": 100}),
        ),
    ),
    Operation(
        package="gpu_worker.policies.protokv.chunks",
        function="irregularity",
        atol=1e-5,
        rtol=1e-4,
        strides={"keys": 2},
        lanes=("keys",),
        refusals=TOO_MANY,
        cases=(
            *(case(themes, *size) for size in CHUNKS),
            *(case(themes, 1, 90, width, 2, kind) for width, kind in WIDTHS),
        ),
    ),
    Operation(
        package="gpu_worker.policies.protokv.chunks",
        function="chunk_sums",
        atol=1e-3,
        rtol=1e-5,
        strides={"keys": 2, "is_member": 2},
        lanes=("keys", "is_member"),
        refusals=TOO_MANY,
        cases=(
            *(case(with_members, *size, members=members) for size in CHUNKS for members in (True, False)),
            *(case(with_members, 1, 90, width, 2, dtype=kind) for width, kind in WIDTHS),
        ),
    ),
)
