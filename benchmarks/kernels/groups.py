"""Kernels that cluster, merge and rank a prompt's tokens: of ClusterKV, ProtoKV, Chelsea and SnapKV."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.commands.options import Workload
from benchmarks.kernels.base import Setting, contexts, mismatch, workloads
from benchmarks.kernels.operation import SAME, Operation, Rival, Sized
from gpu_worker.kernels.kmeans.reference import MAX_SCORES, sort_members
from gpu_worker.policies.chelsea.soft_matching.reference import WeightedRows, num_matches
from gpu_worker.policies.protokv.hash_buckets.reference import RandomFeatures
from gpu_worker.row_format import row_format

Arguments = tuple[Any, ...]
KERNELS = "kernels."
# ClusterKV's clusters; ProtoKV's chunks, irregular keys and buckets; Chelsea's chunk and merged share.
TOKENS_PER_CLUSTER = 80
CHUNK_TOKENS, NUM_IRREGULAR, NUM_BUCKETS = 50, 48, 16
MERGE_CHUNK, MERGED_SHARE = 256, 0.35
# SnapKV's last queries; SemanticKV's, one in so many; tokens that are kept, one in so many.
NUM_LAST, SCATTERED_SHARE, KEPT_SHARE = 32, 50, 5
# Above so many scores a rival in PyTorch takes longer than all other cases.
RIVAL_SCORES = 1 << 30
CLUSTERS, PROTO, CHELSEA = "policies.clusterkv.", "policies.protokv.", "policies.chelsea.soft_matching"


def observed(setting: Setting) -> Iterator[tuple[int, str, int]]:
    """The last queries of each context, and some anywhere in it."""
    for context in contexts(setting):
        yield context, "last", min(NUM_LAST, context)
        yield context, "scattered", -(-context // SCATTERED_SHARE)


def observed_weight(s: Setting, size: tuple[int, str, int]) -> Sized:
    (context, kind, width), num_heads = size, s.shape.num_heads

    def make() -> Arguments:
        positions = torch.arange(context - width, context, device=s.device).expand(num_heads, -1)
        if kind == "scattered":
            positions = s.uniform(num_heads, context).argsort(dim=1)[:, :width].sort(dim=1).values
        shares = torch.full(positions.shape, 1 / width, device=s.device)
        queries, keys = s.normal(num_heads, width, s.dim), s.normal(s.heads, context, s.dim)
        return queries, keys, positions, shares, s.dim**-0.5

    num_bytes = (s.heads * context + num_heads * width) * s.dim * s.item + 4 * s.heads * context
    has_rival = num_heads * width * context <= RIVAL_SCORES
    return Sized(f"{num_heads} x {width} {kind}, {context}", num_bytes, make, has_rival=has_rival)


def best_rows(s: Setting, context: int) -> Sized:
    width = max(1, context // KEPT_SHARE)

    def make() -> Arguments:
        # rows of a group score alike, as ProtoKV's do
        groups = s.uniform(s.heads, -(-context // CHUNK_TOKENS))
        member = s.uniform(s.heads, context).mul_(groups.shape[1]).long()
        first = groups.gather(1, member.clamp_(max=groups.shape[1] - 1))
        return first, s.ints(width, s.heads), width, s.floats(s.heads, context).mul_(2).exp_()

    return Sized(f"{s.heads} x {context} to {width}", s.heads * 8 * (context + width), make)


def num_clusters_of(context: int) -> int:
    return max(2, context // TOKENS_PER_CLUSTER)


def assign_points(s: Setting, context: int) -> Sized:
    num_clusters = num_clusters_of(context)
    num_bytes = s.heads * ((context + num_clusters) * s.dim * s.item + 4 * context)
    make = lambda: (s.normal(s.heads, context, s.dim), s.normal(s.heads, num_clusters, s.dim))  # noqa: E731
    return Sized(f"{s.heads} x {context} to {num_clusters}", num_bytes, make)


def torch_assign(s: Setting, points: Tensor, targets: Tensor) -> Callable[[], object]:
    rows = max(1, MAX_SCORES // (s.heads * targets.shape[1]))
    return lambda: torch.cat([(part @ targets.mT).argmax(-1) for part in points.split(rows, dim=1)], dim=1)


def move_centroids(s: Setting, context: int) -> Sized:
    num_clusters = num_clusters_of(context)

    def make() -> Arguments:
        labels = torch.randint(num_clusters, (s.heads, context), dtype=torch.int32, device=s.device)
        # by directions, as ClusterKV
        return s.normal(s.heads, context, s.dim), *sort_members(labels, num_clusters), True

    read = context * (s.dim * s.item + 8) + 8 * num_clusters
    written = num_clusters * (s.dim * (4 + s.item) + 4)
    return Sized(f"{s.heads} x {context} in {num_clusters}", s.heads * (read + written), make)


def moved(run: Callable[..., Any], *arguments: Any) -> Arguments:
    found = run(*arguments)
    return found.means, found.targets


def centroid_rank(s: Setting, at: Workload) -> Sized:
    num_clusters, rows = num_clusters_of(at.context), at.batch * s.heads

    def make() -> Arguments:
        size = (at.batch, s.heads)
        # cluster c holds every position that leaves the rest c
        places = torch.arange(at.context, dtype=torch.int32, device=s.device).expand(*size, at.context)
        labels = (places % num_clusters).contiguous()
        within = places.div(num_clusters, rounding_mode="floor")
        sizes = s.ints(0, *size, num_clusters, dtype=torch.int32)
        sizes.scatter_add_(-1, labels.long(), torch.ones_like(labels))
        query, centroids = s.normal(at.batch, s.shape.num_heads, s.dim), s.floats(*size, num_clusters, s.dim)
        begin = s.ints(0, at.batch)
        ends = s.seats(at.batch), begin, begin + at.context
        return query, centroids, sizes, labels, within, *ends, at.context

    num_bytes = rows * (12 * at.context + 4 * num_clusters * (s.dim + 1))
    return Sized(f"{rows} x {at.context}", num_bytes, make)


def chunk_sums(s: Setting, context: int) -> Sized:
    num_chunks, left_out = max(1, context // CHUNK_TOKENS), min(NUM_IRREGULAR, context // 2)

    def make() -> Arguments:
        irregular = s.uniform(s.heads, context).topk(left_out).indices
        is_member = s.ints(1, s.heads, context, dtype=torch.bool).scatter_(1, irregular, False)
        return s.normal(s.heads, context, s.dim), num_chunks, is_member

    a_head = context + (context - left_out) * s.dim * s.item + num_chunks * s.dim * 4
    return Sized(f"{s.heads} x {context} in {num_chunks}", s.heads * a_head, make)


def irregularity(s: Setting, context: int) -> Sized:
    num_chunks = max(1, context // CHUNK_TOKENS)
    make = lambda: (s.normal(s.heads, context, s.dim), num_chunks)  # noqa: E731
    return Sized(f"{s.heads} x {context} in {num_chunks}", s.heads * context * (s.dim * s.item + 4), make)


def bucket_sums(s: Setting, num_keys: int) -> Sized:
    def make() -> Arguments:
        keys = s.normal(s.heads, num_keys, s.dim)
        return keys, RandomFeatures.draw(keys, NUM_BUCKETS, 1.0, seed=0)

    numbers = NUM_BUCKETS * s.dim + (NUM_BUCKETS - 1).bit_length() * (s.dim + 1)
    num_bytes = s.heads * (num_keys * s.dim * s.item + 4 * numbers)
    return Sized(f"{s.heads} x {num_keys} in {NUM_BUCKETS}", num_bytes, make)


def group_means(s: Setting, context: int) -> Sized:
    num_groups = max(1, context // CHUNK_TOKENS) + NUM_BUCKETS

    def make() -> Arguments:
        labels = torch.randint(num_groups, (s.heads, context), dtype=torch.int32, device=s.device)
        return s.uniform(s.heads, context) / context, labels, num_groups

    return Sized(f"{s.heads} x {context} in {num_groups}", 12 * s.heads * context, make)


def match_rows(s: Setting, context: int) -> Sized:
    a_head = context * s.dim * s.item + num_matches(context, MERGE_CHUNK) * (8 + 4)
    make = lambda: (s.normal(s.heads, context, s.dim), MERGE_CHUNK)  # noqa: E731
    return Sized(f"{s.heads} x {context} by {MERGE_CHUNK}", s.heads * a_head, make)


def merge_rows(s: Setting, context: int) -> Sized:
    num_merged = int(MERGED_SHARE * context)

    def make() -> Arguments:
        size = (s.heads, context)
        keys, values = (s.normal(*size, s.dim) for _ in range(2))
        positions = torch.arange(context, device=s.device).expand(size)
        rows = WeightedRows(positions, torch.ones(size, device=s.device), keys, values)
        return rows, MERGE_CHUNK, num_merged

    kept = context - num_merged
    # what is left is in float32
    a_head = context * (12 + s.row_bytes) + kept * (12 + row_format(s.dim, torch.float32).row_bytes)
    return Sized(f"{s.heads} x {context} to {kept}", s.heads * a_head, make)


def merged(run: Callable[..., Any], *arguments: Any) -> Arguments:
    found = run(*arguments)
    return found.keys, found.values


OPERATIONS = {
    "centroid_rank": Operation(
        CLUSTERS + "centroid_rank", "centroid_rank", workloads, centroid_rank, mismatch
    ),
    "observed_weight": Operation(
        KERNELS + "observed_weight", "observed_weight", observed, observed_weight, rival=SAME
    ),
    "best_rows": Operation(KERNELS + "best_rows", "best_rows", contexts, best_rows, mismatch, SAME),
    "irregularity": Operation(PROTO + "chunks", "irregularity", contexts, irregularity, rival=SAME),
    "chunk_sums": Operation(PROTO + "chunks", "chunk_sums", contexts, chunk_sums, rival=SAME),
    "bucket_sums": Operation(
        PROTO + "hash_buckets", "bucket_sums", lambda _: (NUM_IRREGULAR, 512), bucket_sums, rival=SAME
    ),
    "group_means": Operation(PROTO + "group_means", "group_means", contexts, group_means, rival=SAME),
    "match_rows": Operation(
        CHELSEA,
        "match_rows",
        contexts,
        match_rows,
        mismatch,
        SAME,
        result=lambda run, *given: run(*given).partner,
    ),
    "merge_rows": Operation(CHELSEA, "merge_rows", contexts, merge_rows, result=merged),
    "assign_points": Operation(
        KERNELS + "kmeans",
        "assign_points",
        contexts,
        assign_points,
        mismatch,
        Rival("torch product, argmax", torch_assign),
    ),
    "move_centroids": Operation(
        KERNELS + "kmeans", "move_centroids", contexts, move_centroids, rival=SAME, result=moved
    ),
}
