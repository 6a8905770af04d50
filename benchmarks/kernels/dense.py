"""Kernels of the model itself: its layers, attention, and grammar masks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from benchmarks.commands.options import Workload
from benchmarks.kernels.base import Setting, batches, contexts, tokens, workloads
from benchmarks.kernels.operation import SAME, Operation, Rival, Sized
from gpu_worker.kernels.attention.reference import BLOCK_SIZE
from gpu_worker.kernels.prefill_attention.reference import attend_chunk_naive

Arguments = tuple[Any, ...]
KERNELS = "kernels."
# Of a prompt: the chunk that is computed at once, and how many of its last tokens the definition is computed for.
CHUNK, NUM_CHECKED = 8192, 64
# Attended tokens of the budget that are sinks or recent; slots of the pool for each attended one: they lie far apart.
FIXED_SLOTS, SPREAD = 96, 8
# H2O keeps one token in so many.
KEPT_SHARE = 5


def rms_norm(s: Setting, count: int) -> Sized:
    width = s.shape.hidden_size
    return Sized(
        f"{count} x {width}",
        4 * count * width * s.item,
        lambda: (s.normal(count, width), s.normal(width), s.shape.rms_norm_eps, s.normal(count, width)),
    )


def torch_norm(s: Setting, hidden: Tensor, weight: Tensor, eps: float, added: Tensor) -> Callable[[], object]:
    return lambda: F.rms_norm(hidden + added, weight.shape, weight, eps)


def rope(s: Setting, count: int) -> Sized:
    shape = s.shape
    turned = shape.num_heads + s.heads
    table = cache(lambda: s.normal(shape.max_len, 2, s.dim))

    def make() -> Arguments:
        qkv = s.normal(count, (turned + s.heads) * s.dim)
        positions = torch.randint(shape.max_len, (count,), device=s.device)
        return qkv, table(), positions, shape.num_heads, s.heads

    return Sized(f"{count} x {turned} heads", 2 * count * turned * s.dim * s.item, make)


def silu_mul(s: Setting, count: int) -> Sized:
    width = s.shape.intermediate_size
    return Sized(f"{count} x {width}", 3 * count * width * s.item, lambda: (s.normal(count, 2 * width),))


def torch_silu_mul(s: Setting, gate_up: Tensor) -> Callable[[], object]:
    gate, up = gate_up.chunk(2, -1)
    return lambda: F.silu(gate) * up


def keep_allowed(s: Setting, count: int) -> Sized:
    vocab_size, device = s.shape.vocab_size, s.device
    num_words = -(-vocab_size // 32)

    def make() -> Arguments:
        words = torch.randint(-(2**31), 2**31, (count, num_words), device=device).int()
        return s.floats(count, vocab_size), torch.arange(count, dtype=torch.int32, device=device), words

    # half of the logits are written
    return Sized(
        f"{count} x {vocab_size}", 4 * count * (num_words + vocab_size) + 2 * count * vocab_size, make
    )


def torch_mask(s: Setting, logits: Tensor, *_: Tensor) -> Callable[[], object]:
    # a byte for each token, as a host may unpack them
    is_removed = s.uniform(*logits.shape) < 0.5
    return lambda: logits.masked_fill_(is_removed, -torch.inf)


def filled_blocks(s: Setting, batch: int, length: int) -> Arguments:
    """Queries, a pool, tables of its blocks at random, seats, lengths, scale and the greatest length."""
    size = (batch, s.heads, -(-length // BLOCK_SIZE))
    num_blocks = size[0] * size[1] * size[2]
    pool = s.normal(num_blocks * BLOCK_SIZE, s.row_format.row_elements)
    tables = torch.randperm(num_blocks, device=s.device).view(size)
    query = s.normal(batch, s.shape.num_heads, s.dim)
    return query, pool, tables, s.seats(batch), s.ints(length, *size[:2]), s.dim**-0.5, length


def attend_blocks(s: Setting, at: Workload) -> Sized:
    rows = at.batch * s.heads
    make = lambda: filled_blocks(s, at.batch, at.context)  # noqa: E731
    return Sized(f"{rows} x {at.context}", rows * at.context * s.row_bytes, make)


def attend_slots(s: Setting, at: Workload) -> Sized:
    attended = min(s.budget_tokens, at.context)
    num_fixed, rows = min(FIXED_SLOTS, attended // 2), at.batch * s.heads
    pool = cache(lambda: s.normal(rows * attended * SPREAD, s.row_format.row_elements))

    def make() -> Arguments:
        order = torch.randperm(pool().shape[0], dtype=torch.int32, device=s.device)
        slots = order[: rows * attended].view(at.batch, s.heads, attended)
        fixed, selected = slots[..., :num_fixed].contiguous(), slots[..., num_fixed:].contiguous()
        query = s.normal(at.batch, s.shape.num_heads, s.dim)
        return query, pool(), fixed, s.seats(at.batch), selected, s.dim**-0.5

    return Sized(f"{rows} x {attended}", rows * attended * s.row_bytes, make)


def torch_attention(s: Setting, query: Tensor, length: int) -> Callable[[], object]:
    keys, values = (s.normal(query.shape[0], s.heads, length, s.dim) for _ in range(2))
    return lambda: F.scaled_dot_product_attention(query[:, :, None], keys, values, enable_gqa=True)


def slot_weights(s: Setting, at: Workload) -> Sized:
    length, rows = max(1, at.context // KEPT_SHARE), at.batch * s.heads
    num_bytes = rows * length * (s.dim * s.item + 4)
    return Sized(f"{rows} x {length}", num_bytes, lambda: filled_blocks(s, at.batch, length))


def prefill_attention(s: Setting, context: int) -> Sized:
    chunk = min(CHUNK, context // 2)

    def make() -> Arguments:
        rows = s.normal(s.heads, context, s.row_format.row_elements)
        return s.normal(chunk, s.shape.num_heads, s.dim), rows, context - chunk, s.dim**-0.5

    num_bytes = s.heads * context * s.row_bytes + 2 * chunk * s.shape.num_heads * s.dim * s.item
    return Sized(f"{chunk} behind {context - chunk}", num_bytes, make)


def last_attended(query: Tensor, rows: Tensor, begin: int, scale: float) -> Tensor:
    """The definition for the last tokens of a chunk: it keeps all their scores."""
    checked = min(NUM_CHECKED, len(query))
    return attend_chunk_naive(query[-checked:], rows, begin + len(query) - checked, scale)


def torch_masked(s: Setting, query: Tensor, rows: Tensor, begin: int, scale: float) -> Callable[[], object]:
    keys, values = rows[None].split(s.dim, dim=-1)
    mask = causal_lower_right(len(query), begin + len(query))
    grouped = query.transpose(0, 1)[None]
    return lambda: F.scaled_dot_product_attention(
        grouped, keys, values, attn_mask=mask, scale=scale, enable_gqa=True
    )


def join_pieces(s: Setting, count: int) -> Sized:
    size = (CHUNK, s.shape.num_heads, s.dim)

    def make() -> Arguments:
        log_sums = s.normal(count, s.shape.num_heads, CHUNK).float()
        return log_sums, *(s.normal(*size) for _ in range(count))

    return Sized(f"{count} x {CHUNK}", (count + 1) * CHUNK * s.shape.num_heads * s.dim * s.item, make)


OPERATIONS = {
    "rms_norm": Operation(
        KERNELS + "rms_norm", "rms_norm", tokens, rms_norm, rival=Rival("torch add, rms_norm", torch_norm)
    ),
    "rope": Operation(KERNELS + "rope", "rope", tokens, rope, rival=SAME),
    "silu_mul": Operation(
        KERNELS + "silu_mul", "silu_mul", tokens, silu_mul, rival=Rival("torch silu, mul", torch_silu_mul)
    ),
    "attend_slots": Operation(
        KERNELS + "attention",
        "attend_slots",
        workloads,
        attend_slots,
        rival=Rival(
            "SDPA, rows in order",
            lambda s, query, _pool, fixed, _seats, selected, _scale: torch_attention(
                s, query, fixed.shape[-1] + selected.shape[-1]
            ),
        ),
    ),
    "attend_blocks": Operation(
        KERNELS + "attention",
        "attend_blocks",
        workloads,
        attend_blocks,
        rival=Rival("SDPA, contiguous", lambda s, query, *rest: torch_attention(s, query, rest[-1])),
    ),
    "slot_weights": Operation(KERNELS + "slot_weights", "slot_weights", workloads, slot_weights, rival=SAME),
    "prefill_attention": Operation(
        KERNELS + "prefill_attention",
        "attend_chunk",
        contexts,
        prefill_attention,
        rival=Rival("SDPA with a mask", torch_masked),
        result=lambda run, *given: run(*given)[-NUM_CHECKED:],
        reference=last_attended,
    ),
    "join_pieces": Operation(
        KERNELS + "join_pieces",
        "join_pieces",
        lambda _: (2, 4, 8),
        join_pieces,
        rival=SAME,
    ),
    "keep_allowed": Operation(
        KERNELS + "keep_allowed",
        "keep_allowed",
        batches,
        keep_allowed,
        rival=Rival("masked_fill_ of bytes", torch_mask),
        result=lambda run, logits, *given: run(copied := logits.clone(), *given) or copied,
    ),
}
