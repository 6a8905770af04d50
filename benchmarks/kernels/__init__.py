"""The kernels' cases by operation: each module has `cases(setting)`, which yields KernelCase after KernelCase."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

from benchmarks.kernels.base import KernelCase, Setting

OPS = (
    "rms_norm",
    "rope",
    "silu_mul",
    "pq_select",
    "pq_score",
    "pq_append",
    "bit_codes",
    "bit_append",
    "bit_score",
    "bit_select",
    "bit_rest",
    "top_k",
    "centroid_rank",
    "page_bound",
    "resolve",
    "fetch",
    "attend_slots",
    "attend_blocks",
    "slot_weights",
    "store_token",
    "prefill_attention",
    "join_pieces",
    "observed_weight",
    "best_rows",
    "irregularity",
    "chunk_sums",
    "bucket_sums",
    "group_means",
    "match_rows",
    "merge_rows",
    "assign_points",
    "move_centroids",
    "pq_assign",
    "keep_allowed",
)


def cases_of(op: str, setting: Setting) -> Iterator[KernelCase]:
    """The cases of one operation. What a case's operands share is freed with it: take one after the other."""
    yield from import_module(f"benchmarks.kernels.{op}").cases(setting)
