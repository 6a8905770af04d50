"""Kernels of the policies that recall: their indexes are built, extended and searched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.commands.options import Workload
from benchmarks.kernels.base import Setting, batches, contexts, mismatch, missed, workloads
from benchmarks.kernels.operation import SAME, Operation, Sized
from gpu_worker.policies.bitkeys.bit_rest.reference import NUM_SAMPLES
from gpu_worker.policies.bitkeys.key_bits.reference import num_code_bytes
from gpu_worker.policies.bitkeys.rotation import Rotation

Arguments = tuple[Any, ...]
KERNELS = "kernels."
# PQCache's parts and centroids, sinks and window; BitKeys' sinks; Quest's pages.
NUM_PARTS, KSUB, PQ_SINKS, PQ_RECENT = 2, 64, 32, 64
BIT_SINKS, SCALE_BYTES = 4, 2
PAGE_TOKENS = 16
# Indexes that a decode step appends to: a short one does, as nothing of it is read but where it writes.
INDEX_LENGTH = 1024
PQ, BITS, QUEST = "policies.pqcache.", "policies.bitkeys.", "policies.quest."


def books(s: Setting, *heads: int) -> Tensor:
    return s.floats(*heads, NUM_PARTS, KSUB, s.dim // NUM_PARTS)


def pq_index(s: Setting, at: Workload) -> tuple[Tensor, ...]:
    """Query, codebooks, codes, counts of their pairs, seats, begin and end of the candidates."""
    begin, end = min(PQ_SINKS, at.context // 4), at.context - min(PQ_RECENT, at.context // 4)
    codes = torch.randint(
        KSUB, (at.batch, s.heads, at.context, NUM_PARTS), dtype=torch.uint8, device=s.device
    )
    pairs = codes[:, :, begin:end, 0].long() * KSUB + codes[:, :, begin:end, 1]
    counts = s.ints(0, at.batch, s.heads, KSUB * KSUB, dtype=torch.int32)
    counts.scatter_add_(-1, pairs, torch.ones_like(pairs, dtype=torch.int32))
    query = s.normal(at.batch, s.shape.num_heads, s.dim)
    scaled = books(s, at.batch, s.heads) / (s.dim // NUM_PARTS) ** 0.5
    return query, scaled, codes, counts, s.seats(at.batch), s.ints(begin, at.batch), s.ints(end, at.batch)


def pq_bytes(s: Setting, at: Workload) -> int:
    """Codes and codebooks, each once."""
    return at.batch * s.heads * (at.context * NUM_PARTS + 4 * KSUB * s.dim)


def pq_select(s: Setting, at: Workload) -> Sized:
    width, rows = min(s.budget_tokens, at.context // 4), at.batch * s.heads
    num_bytes = pq_bytes(s, at) + rows * (4 * KSUB * KSUB + 8 * width)
    make = lambda: (*pq_index(s, at), s.ints(width, at.batch), width, at.context, s.dim**-0.5)  # noqa: E731
    return Sized(f"{rows} x {at.context} to {width}", num_bytes, make)


def pq_score(s: Setting, at: Workload) -> Sized:
    rows = at.batch * s.heads

    def make() -> Arguments:
        query, codebooks, codes, _, *candidates = pq_index(s, at)
        return query, codebooks, codes, *candidates, s.dim**-0.5, at.context

    return Sized(f"{rows} x {at.context}", pq_bytes(s, at) + 4 * rows * at.context, make)


def pq_append(s: Setting, batch: int) -> Sized:
    heads = (batch, s.shape.num_layers, s.heads)

    def make() -> Arguments:
        codes = s.ints(0, *heads, INDEX_LENGTH, NUM_PARTS, dtype=torch.uint8)
        counts = s.ints(0, *heads, KSUB * KSUB, dtype=torch.int32)
        positions = s.ints(INDEX_LENGTH // 2, batch)
        return s.normal(*heads, s.dim), books(s, *heads), codes, counts, s.seats(batch), positions

    num_bytes = batch * s.shape.num_layers * s.heads * s.dim * (4 * KSUB + s.item)
    return Sized(f"{batch} tokens of {s.shape.num_layers} layers", num_bytes, make)


def appended_codes(run: Callable[..., Any], keys: Tensor, centroids: Tensor, *rest: Tensor) -> Tensor:
    codes, counts, seats, positions = rest
    found = codes.clone()
    run(keys, centroids, found, counts.clone(), seats, positions)
    return found[..., INDEX_LENGTH // 2, :]


def pq_assign(s: Setting, context: int) -> Sized:
    a_head = context * (s.dim * s.item + NUM_PARTS) + 4 * KSUB * s.dim
    make = lambda: (s.normal(s.heads, context, s.dim), books(s, s.heads))  # noqa: E731
    return Sized(f"{s.heads} x {context} to {NUM_PARTS} x {KSUB}", s.heads * a_head, make)


def code_bytes(s: Setting) -> int:
    """Codes and scale of a token in one head."""
    return num_code_bytes(s.dim) + SCALE_BYTES


def coding(s: Setting, *heads: int, length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Means, rotation, codes and scales of keys."""
    size = (*heads, length)
    codes = torch.randint(256, (*size, num_code_bytes(s.dim)), dtype=torch.uint8, device=s.device)
    return s.floats(*heads, s.dim), Rotation.of(s.dim, s.device).matrix, codes, s.uniform(*size).half()


def bit_codes(s: Setting, context: int) -> Sized:
    make = lambda: (s.normal(s.heads, context, s.dim), *coding(s, s.heads, length=context))  # noqa: E731
    return Sized(f"{s.heads} x {context}", s.heads * context * (s.dim * s.item + code_bytes(s)), make)


def bit_append(s: Setting, batch: int) -> Sized:
    heads = (batch, s.shape.num_layers, s.heads)

    def make() -> Arguments:
        index = coding(s, *heads, length=INDEX_LENGTH)
        return s.normal(*heads, s.dim), *index, s.seats(batch), s.ints(INDEX_LENGTH // 2, batch)

    num_bytes = batch * s.shape.num_layers * s.heads * (s.dim * (s.item + 4) + code_bytes(s))
    return Sized(f"{batch} tokens of {s.shape.num_layers} layers", num_bytes, make)


def coded(run: Callable[..., Any], keys: Tensor, means: Tensor, *rest: Tensor) -> Tensor:
    rotation, codes, scales, *place = rest
    found = codes.clone()
    run(keys, means, rotation, found, scales.clone(), *place)
    return found


def bit_candidates(s: Setting, at: Workload) -> tuple[Arguments, Arguments]:
    """Query, rotation, codes and scales; and seats, begin and end of the candidates."""
    _, *coded_keys = coding(s, at.batch, s.heads, length=at.context)
    ends = s.seats(at.batch), s.ints(BIT_SINKS, at.batch), s.ints(at.context, at.batch)
    return (s.normal(at.batch, s.shape.num_heads, s.dim), *coded_keys), ends


def bit_score(s: Setting, at: Workload) -> Sized:
    rows = at.batch * s.heads

    def make() -> Arguments:
        keys, ends = bit_candidates(s, at)
        return *keys, s.floats(at.batch, s.heads, BIT_SINKS, s.dim), *ends, s.dim**-0.5, at.context

    return Sized(f"{rows} x {at.context}", rows * at.context * (code_bytes(s) + 4), make)


def bit_select(s: Setting, at: Workload) -> Sized:
    width, rows = min(s.budget_tokens, at.context // 4), at.batch * s.heads

    def make() -> Arguments:
        keys, ends = bit_candidates(s, at)
        counts, sinks = s.ints(width, at.batch), s.floats(at.batch, s.heads, BIT_SINKS, s.dim)
        return *keys, sinks, *ends, counts, width, at.context, s.dim**-0.5

    return Sized(f"{rows} x {at.context} to {width}", rows * (at.context * code_bytes(s) + 8 * width), make)


def bit_rest(s: Setting, at: Workload) -> Sized:
    width, rows = min(s.budget_tokens, at.context // 4), at.batch * s.heads

    def make() -> Arguments:
        (keys, ends), heads = bit_candidates(s, at), (at.batch, s.heads)
        stride = (at.context - BIT_SINKS) // width
        selected = BIT_SINKS + torch.arange(width, device=s.device) * stride
        means, fitted = s.floats(*heads, s.dim), s.floats(*heads, s.dim)
        covariances = s.floats(*heads, s.dim, s.dim).bfloat16()
        return *keys, means, fitted, covariances, *ends, selected.expand(*heads, width), s.dim**-0.5

    num_bytes = rows * (NUM_SAMPLES * code_bytes(s) + 2 * s.dim**2)
    return Sized(f"{rows} x {at.context} but {width}", num_bytes, make)


def page_bound(s: Setting, at: Workload) -> Sized:
    num_pages, rows = max(1, at.context // PAGE_TOKENS), at.batch * s.heads

    def make() -> Arguments:
        extremes = s.normal(2, at.batch, s.heads, num_pages, s.dim)
        query, begin = s.normal(at.batch, s.shape.num_heads, s.dim), s.ints(0, at.batch)
        return (
            query,
            extremes.amin(0),
            extremes.amax(0),
            s.seats(at.batch),
            begin,
            begin + num_pages,
            num_pages,
        )

    return Sized(f"{rows} x {num_pages} pages", rows * num_pages * (s.row_bytes + 4), make)


OPERATIONS = {
    "pq_select": Operation(PQ + "pq_select", "pq_select", workloads, pq_select, missed),
    "pq_score": Operation(PQ + "pq_score", "pq_score", workloads, pq_score),
    "pq_append": Operation(
        PQ + "pq_append", "pq_append", batches, pq_append, mismatch, result=appended_codes
    ),
    "pq_assign": Operation(
        PQ + "pq_score", "pq_assign", contexts, pq_assign, mismatch, SAME, kernel="assign_kernel"
    ),
    "bit_codes": Operation(BITS + "key_bits", "code_prompt", contexts, bit_codes, mismatch, SAME, coded),
    "bit_append": Operation(BITS + "key_bits", "code_leaving", batches, bit_append, mismatch, result=coded),
    "bit_score": Operation(BITS + "bit_score", "bit_score", workloads, bit_score),
    "bit_select": Operation(BITS + "bit_select", "bit_select", workloads, bit_select, missed),
    "bit_rest": Operation(
        BITS + "bit_rest", "bit_rest", workloads, bit_rest, result=lambda run, *given: run(*given).values
    ),
    "page_bound": Operation(QUEST + "page_bound", "page_bound", workloads, page_bound),
}
