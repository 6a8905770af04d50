"""Kernels of a step and a prompt are compiled for the first batch and prompt, and never again."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

# For batches of these lanes, from this lane on of a table of all, and sequences as long as this.
SHAPES = "((1, 0, 600), (1, 1, 40000), (2, 0, 5000), (3, 4, 16384), (8, 1, 130000), (24, 8, 20000))"
HEAD = f"""
import torch
from torch import bfloat16, float16, float32, int32, int64, uint8
from compile_rig import note_only
noted = note_only()
SHAPES = {SHAPES}
"""
# Rows of four layers and two seats, small where only strides count.
STEP = """
from gpu_worker.kernels.attention.kernel import attend_blocks, attend_slots
from gpu_worker.kernels.keep_allowed.kernel import keep_allowed
from gpu_worker.kernels.packed_matmul.kernel import packed_matmul
from gpu_worker.kernels.packed_matmul.reference import PackedMatrix
from gpu_worker.kernels.resolve.kernel import resolve
from gpu_worker.kernels.resolve.reference import Residency, SeatLanes
from gpu_worker.kernels.rope.kernel import rope
from gpu_worker.kernels.rows.fetch_kernel import fetch_misses, offsets_by_table, pool_rows
from gpu_worker.kernels.rows.kernel import store_token
from gpu_worker.kernels.rows.reference import ArenaLayout
from gpu_worker.kernels.slot_weights.kernel import slot_weights
from gpu_worker.policies.bitkeys.bit_select.kernel import bit_select
from gpu_worker.policies.bitkeys.key_bits.kernel import code_leaving
from gpu_worker.policies.pqcache.pq_append.kernel import pq_append
from gpu_worker.policies.pqcache.pq_select.kernel import pq_select
from gpu_worker.row_format import row_format

SEATS, HEADS, DIM, LENGTH, CHOSEN = 32, 8, 128, 131072, 1024
zeros = torch.zeros
pool, blocks = zeros(640, 2 * DIM, dtype=bfloat16), zeros(SEATS, HEADS, LENGTH // 64, dtype=int64)
fixed = zeros(SEATS, 4, HEADS, 1041, dtype=int32)[:, 1]
codes = zeros(1, 1, 1, LENGTH, 2, dtype=uint8).expand(SEATS, 4, HEADS, LENGTH, 2)
books, pairs = zeros(SEATS, 4, HEADS, 2, 64, 64), zeros(SEATS, 4, HEADS, 64 * 64, dtype=int32)
matrix, means, sinks = zeros(DIM, DIM, dtype=bfloat16), zeros(SEATS, 4, HEADS, DIM), zeros(SEATS, 4, HEADS, 4, DIM)
of_bits = zeros(1, 1, 1, LENGTH, DIM // 4, dtype=uint8).expand(SEATS, 4, HEADS, LENGTH, DIM // 4)
scales = zeros(1, 1, 1, LENGTH, dtype=float16).expand(SEATS, 4, HEADS, LENGTH)
slot_of = zeros(1, 1, LENGTH, dtype=int32).expand(SEATS, HEADS, LENGTH)
bits, counters = slot_of.to(uint8), zeros(SEATS, HEADS, dtype=int32)
state = Residency(slot_of, slot_of, bits, counters, counters)
arena, slabs = zeros(1 << 20, dtype=uint8), zeros(SEATS, 256, dtype=int32)
layout = ArenaLayout(1 << 18, 64, row_format(DIM, bfloat16))
rotary = zeros(9, 2, DIM, dtype=bfloat16)
words, tickets = zeros(8, 1024, 64, dtype=uint8), zeros(64, dtype=int32)
matrix_of_4_bits = PackedMatrix(words, zeros(8, 1024), tickets, 1024, 128)

for lanes, first, longest in SHAPES:
    table = zeros(10, first + lanes, dtype=int64)[:, first:]
    positions, seats, begin, end, counts, capacities, *_ = table.unbind(0)
    longest = -(-longest // 1024) * 1024
    query, key, value = rope(zeros(first + lanes, 48 * DIM, dtype=bfloat16), rotary, table[0] * 1, 32, 8)
    query, slots = query[first:] if first else query, zeros(lanes, 4, HEADS, dtype=int32)
    packed_matmul(zeros(lanes, 1024, dtype=bfloat16), matrix_of_4_bits)
    store_token(key[first:], value[first:], pool, slots[:, 1], arena, zeros(lanes, 4, HEADS, dtype=int64)[:, 1])
    packed = zeros(1 + lanes // 2, 1 + 1537, dtype=int32)
    keep_allowed(zeros(first + lanes, 49155)[first:], packed[:, 0], packed[:, 1:])
    lengths = (positions + 1)[:, None].expand(-1, HEADS)
    attend_blocks(query, pool, blocks, seats, lengths, 0.1, longest)
    slot_weights(query, pool, blocks, seats, lengths, 0.1, longest)
    chosen = zeros(lanes, HEADS, CHOSEN, dtype=int64)
    attend_slots(query, pool, fixed, seats, chosen.int(), 0.1)
    pq_select(query, books[:, 1], codes[:, 1], pairs[:, 1], seats, begin, end, counts, CHOSEN, longest, 0.1)
    leaving = zeros(lanes, 4, HEADS, DIM, dtype=bfloat16)
    pq_append(leaving, books, codes, pairs, seats, positions)
    index = of_bits[:, 1], scales[:, 1], sinks[:, 1], seats, begin, end
    bit_select(query, matrix, *index, counts, CHOSEN, longest, 0.1)
    code_leaving(leaving, means, matrix, of_bits, scales, seats, positions)
    rows = SeatLanes(seats, capacities, begin, end)
    resolve(state, rows, chosen)
    resolve(state, rows, positions[:, None, None].expand(-1, HEADS, 1))
    pool_rows(blocks, seats, positions[:, None, None].expand(-1, HEADS, 1), chosen[..., :1].int())
    pool_rows(blocks, seats, chosen, chosen.int())
    fetch_misses(arena, layout, slabs, blocks, seats, chosen, chosen, chosen > 0, pool, chosen.int())
    offsets_by_table(slabs, (seats[:, None] * zeros(4, dtype=int64)).flatten(), chosen[:, :1, :1], layout, 4)
"""
PROMPT = """
from gpu_worker.kernels.best_rows.kernel import best_rows
from gpu_worker.kernels.kmeans.kernel import assign_points, move_centroids
from gpu_worker.kernels.observed_weight.kernel import observed_weight
from gpu_worker.kernels.rows.prompt_kernel import keep_rows, load_prompt, store_prompt
from gpu_worker.policies.bitkeys.bit_rest.fit_kernel import fit_values
from gpu_worker.policies.bitkeys.key_bits.kernel import centre, code_prompt
from gpu_worker.policies.pqcache.pq_score.assign_kernel import pq_assign

matrix, scales = torch.zeros(128, 128, dtype=bfloat16), torch.zeros(8, 32768, dtype=float16)
for num_tokens in 300, 1024, 4096, 15044, 32768, 131072:
    keys, values = torch.zeros(8, num_tokens, 256, dtype=bfloat16).split(128, dim=2)
    fit_values(keys, values, torch.zeros(8, 128), torch.zeros(8, 128), torch.zeros(8, 128, 128, dtype=bfloat16))
    centre(keys, torch.zeros(8, 128), torch.zeros(8, 4, 128))
    code_prompt(keys, torch.zeros(8, 128), matrix, torch.zeros(8, 32768, 32, dtype=uint8), scales)
    points = torch.zeros(16, min(num_tokens, 4096), 64, dtype=bfloat16)
    assign_points(points, torch.zeros(16, 64, 64, dtype=bfloat16), torch.zeros(16, 64))
    order, ends = torch.zeros(points.shape[:2], dtype=int64), torch.zeros(16, 64, dtype=int64)
    move_centroids(points, order, ends, False)
    pq_assign(torch.zeros(8, num_tokens, 256, dtype=bfloat16)[..., :128], torch.zeros(8, 2, 64, 64))
    for counts in None, torch.zeros(8, dtype=int64):
        best_rows(torch.zeros(8, num_tokens), counts, num_tokens // 10)
    tables, width = torch.zeros(2, 32, 8, 2048, dtype=int64), 1 << (num_tokens // 5).bit_length()
    held, few = torch.zeros(1, 1, 1, 1, dtype=int64).expand(2, 32, 8, width), torch.zeros(2, 32, 8, dtype=int32)
    kept = torch.zeros(8, num_tokens // 5, 256, dtype=bfloat16)
    slots = torch.zeros(kept.shape[:2], dtype=int64)
    of_layer = num_tokens % 2, num_tokens % 31, num_tokens % 32
    pool = torch.zeros(640, 256, dtype=bfloat16)
    keep_rows(slots, *kept.split(128, 2), pool, tables, held, few, few, *of_layer)
    store_prompt(torch.zeros(1, 8, num_tokens, 256, dtype=bfloat16), pool, tables, *of_layer[:2])
    of_prompt = torch.zeros(1, 1, 8, num_tokens // 64, dtype=int64)
    store_prompt(torch.zeros(1, 8, num_tokens, 256, dtype=bfloat16), pool, of_prompt, 0, 0)
    load_prompt(torch.zeros(8, num_tokens, 256, dtype=bfloat16), pool, of_prompt[0, 0])
    last = torch.arange(num_tokens - 32, num_tokens).expand(32, 32)
    for given in (None, None), (last, torch.ones(32, 1).expand(32, 32)):
        observed_weight(torch.zeros(32, 32, 128, dtype=bfloat16), keys, *given, 0.1)
"""


@pytest.mark.parametrize("script", [STEP, PROMPT], ids=["step", "prompt"])
def test_no_length_and_no_batch_size_compiles_again(script: str) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    given = "print(*sorted(name for name, _ in noted), sep='\\n')"
    command = [sys.executable, "-c", HEAD + script + given]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    names = done.stdout.split()
    twice = {name: names.count(name) for name in names if names.count(name) > 1}
    if script is STEP:
        # Of two lists; of one new token, and of what is selected; of few heads and of many;
        # and of up to 8 lanes and up to 32.
        kinds = {
            "attend_split",
            "join_splits",
            "find_rows",
            "resolve_head",
            "round_queries",
            "weigh_codes",
            "multiply_split",
        }
        # A head's levels are in registers: of 8K tokens, 64K, 16K, 128K and 32K here.
        assert twice == {**dict.fromkeys(kinds, 2), "take_levels": 5}
    else:
        # As many rows of every head, or of each its own number; the last queries, or some with their shares.
        kinds = {"take_best", "tally", "write_best", "split_log_sums", "join_log_sums", "sum_weights"}
        # Of a score there are four digits.
        assert twice == {**dict.fromkeys(kinds, 2), "count_digit": 8}
