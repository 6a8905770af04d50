"""Every kernel goes through Triton's compiler for an H200, with what its wrapper passes."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gpu_worker

pytest.importorskip("triton")

# The interpreter is chosen for a whole process, so each of these is another one.
HEAD = """
import torch
from torch import bfloat16, float16, float32, int32, int64, uint8
from compile_rig import compile_only
compile_only()

def zeros(*shape, dtype=float32):
    return torch.zeros(shape, dtype=dtype)
"""
ATTENTION = """
from gpu_worker.kernels.attention.kernel import attend_blocks, attend_slots
from gpu_worker.kernels.attention.reference import Rest
from gpu_worker.kernels.join_pieces.kernel import join_past, join_pieces

join_past(zeros(3, 2, 18), zeros(3, 18, 2, 128, dtype=bfloat16), zeros(4, 9), zeros(9, 4, 128, dtype=bfloat16))
join_pieces(zeros(3, 4, 9), *[zeros(9, 4, 128, dtype=bfloat16)] * 3)

lengths, seats = torch.ones(2, 2, dtype=int64), torch.arange(2)
# One type of rows with every list and bias; the other, whose heads are padded, with most at once.
for dtype, group, head_dim, is_first in (bfloat16, 4, 128, True), (float16, 3, 96, False):
    query, pool = zeros(2, 2 * group, head_dim, dtype=dtype), zeros(64, 2 * head_dim, dtype=dtype)
    for num_fixed, num_selected in (0, 1), (144, 1008):
        fixed = zeros(5, 3, 2, num_fixed, dtype=int32)[:, 1]
        if is_first:
            attend_slots(query, pool, fixed, seats, zeros(2, 2, num_selected, dtype=int32), 0.1)
    rest = Rest(zeros(2, 2 * group, head_dim), zeros(2, 2 * group))
    attend_slots(query, pool, fixed, seats, zeros(2, 2, 9, dtype=int32), 0.1, rest)
    for width in 1, 130:
        tables = zeros(5, 2, width, dtype=int64)
        if is_first:
            attend_blocks(query, pool, tables, seats, lengths, 0.1, 64 * width)
    attend_blocks(query, pool, tables, seats, lengths, 0.1, 130, zeros(5, 130, 2).mT)
    if is_first:
        attend_blocks(query, pool, tables, seats, lengths, 0.1, 130, zeros(5, 2, 130))
        attend_blocks(query, pool, tables.int(), seats, lengths[:, :1].expand(2, 2), 0.1, 1)
"""
TOP_K = """
from gpu_worker.kernels.best_rows.kernel import best_rows
from gpu_worker.kernels.top_k.kernel import top_k

for num_positions, width in (100, 7), (40000, 2048):
    top_k(zeros(2, 3, num_positions), zeros(2, dtype=int64), width)
for num_rows in 5000, 70000:
    best_rows(zeros(3, num_rows), zeros(3, dtype=int64), 7)
    best_rows(zeros(3, num_rows), None, 7, zeros(3, num_rows))
"""
SCORES = """
from gpu_worker.policies.clusterkv.centroid_rank.kernel import centroid_rank
from gpu_worker.policies.quest.page_bound.kernel import page_bound
from gpu_worker.policies.pqcache.pq_score.assign_kernel import pq_assign
from gpu_worker.policies.pqcache.pq_score.kernel import pq_score
from gpu_worker.kernels.slot_weights.kernel import slot_weights

seats, begin, end = torch.arange(2), zeros(2, dtype=int64), torch.full((2,), 4000)
for dtype, group, head_dim, parts in (bfloat16, 4, 128, 2), (float16, 3, 96, 4):
    query, codebooks = zeros(2, 2 * group, head_dim, dtype=dtype), zeros(2, 2, parts, 64, head_dim // parts)
    codes, beside = zeros(2, 2, 5000, parts, dtype=uint8), zeros(2, 2 * group)
    pq_score(query, codebooks, codes, seats, begin, end, 0.1, 4000)
    pq_score(query, codebooks, codes, seats, begin, end, 0.1, 4000, beside)
    pq_assign(zeros(2, 2, 33, head_dim, dtype=dtype), codebooks)
    places, sizes = zeros(2, 2, 5000, dtype=int32), zeros(2, 2, 100, dtype=int32)
    centroid_rank(query, zeros(2, 2, 100, head_dim), sizes, places, places, seats, begin, end, 4000)
    pages = zeros(2, 2, 300, head_dim, dtype=dtype)
    page_bound(query, pages, pages, seats, begin, end, 250)
    pool, tables = zeros(640, 2 * head_dim, dtype=dtype), zeros(2, 2, 5, dtype=int64)
    slot_weights(query, pool, tables, seats, zeros(2, 2, dtype=int64), 0.1, 300)
"""
KMEANS = """
from gpu_worker.kernels.kmeans.kernel import assign_points, move_centroids

for dtype, width in (bfloat16, 128), (float16, 33), (float32, 256):
    points, targets = zeros(2, 900, width, dtype=dtype), zeros(2, 300, width, dtype=dtype)
    assign_points(points, targets)
    if dtype is bfloat16:
        assign_points(points, targets, zeros(2, 300))
    for is_unit in (False, True) if dtype is bfloat16 else (True,):
        move_centroids(points, zeros(1800, dtype=int64), zeros(2, 300, dtype=int64), is_unit)
"""
PROTOTYPES = """
from gpu_worker.policies.protokv.chunks.kernel import chunk_sums, irregularity
from gpu_worker.policies.protokv.group_means.kernel import group_means
from gpu_worker.policies.protokv.hash_buckets import RandomFeatures
from gpu_worker.policies.protokv.hash_buckets.kernel import bucket_sums

for dtype, width, num_rows, num_chunks in (bfloat16, 128, 32760, 655), (float32, 256, 1, 1):
    keys = zeros(1 if num_rows == 1 else 2, num_rows, 2 * width, dtype=dtype)[..., :width]
    irregularity(keys, num_chunks)
    for is_member in None, zeros(*keys.shape[:2], dtype=torch.bool):
        chunk_sums(keys, num_chunks, is_member)
    for num_buckets in 1, 16:
        bucket_sums(keys[:, :48].contiguous(), RandomFeatures.draw(keys, num_buckets, 1.0, 0))
    for kind in int32, int64:
        group_means(zeros(*keys.shape[:2]), zeros(*keys.shape[:2], dtype=kind), num_chunks)
"""
SOFT_MATCHING = """
from gpu_worker.policies.chelsea.soft_matching import WeightedRows
from gpu_worker.policies.chelsea.soft_matching.kernel import match_rows, merge_rows

for dtype, width, chunk, num_rows in (bfloat16, 128, 256, 32768), (float32, 128, 256, 21299), (float16, 96, 2, 100):
    positions, both = torch.arange(num_rows).expand(2, -1), zeros(2, num_rows, 2 * width, dtype=dtype)
    rows = WeightedRows(positions, zeros(2, num_rows), both[..., :width], both[..., width:])
    match_rows(rows.keys, chunk)
    # Into another type than that of the rows, once.
    for into in (dtype, float32) if dtype is bfloat16 else (dtype,):
        merge_rows(rows, chunk, 40, into)
"""
OBSERVED = """
from gpu_worker.kernels.observed_weight.kernel import observed_weight

for dtype, group, head_dim, width, num_tokens in (bfloat16, 4, 128, 32, 8000), (float32, 3, 256, 300, 300):
    keys = zeros(2, num_tokens, 2 * head_dim, dtype=dtype)[..., :head_dim]
    positions, shares = zeros(2 * group, width, dtype=int64), zeros(2 * group, 1).expand(-1, width)
    observed_weight(zeros(2 * group, width, head_dim, dtype=dtype), keys, positions, shares, 0.1)
    if dtype is bfloat16:
        observed_weight(zeros(2 * group, width, head_dim, dtype=dtype), keys, None, None, 0.1)
"""
PAIRS = """
from gpu_worker.policies.pqcache.pq_append.kernel import pq_append
from gpu_worker.policies.pqcache.pq_select.kernel import pq_select

seats, begin, end = torch.arange(2), zeros(2, dtype=int64), torch.full((2,), 4000)
for dtype, group, ksub, dsub, num_positions in (bfloat16, 4, 64, 64, 131072), (float16, 3, 128, 48, 80001):
    query, keys = zeros(2, 2 * group, 2 * dsub, dtype=dtype), zeros(2, 3, 2, 2 * dsub, dtype=dtype)
    codebooks, codes = zeros(2, 3, 2, 2, ksub, dsub), zeros(2, 3, 2, num_positions, 2, dtype=uint8)
    counts = zeros(2, 3, 2, ksub * ksub, dtype=int32)
    index = codebooks[:, 1], codes[:, 1], counts[:, 1]
    pq_select(query, *index, seats, begin, end, end, 4000, num_positions, 0.1)
    pq_append(keys, codebooks, codes, counts, seats, begin)
    pq_append(keys, codebooks, codes, None, seats, begin)
"""
BITS = """
from gpu_worker.policies.bitkeys.bit_rest.fit_kernel import fit_values
from gpu_worker.policies.bitkeys.bit_rest.kernel import bit_rest
from gpu_worker.policies.bitkeys.bit_score.kernel import bit_score
from gpu_worker.policies.bitkeys.bit_select.kernel import bit_select
from gpu_worker.policies.bitkeys.key_bits.kernel import centre, code_leaving, code_prompt

# The widest heads, which take most shared memory, and padded ones.
for dtype, group, head_dim in (bfloat16, 4, 256), (float32, 3, 80):
    codes, scales = zeros(2, 3, 2, 5120, head_dim // 4, dtype=uint8), zeros(2, 3, 2, 5120, dtype=float16)
    keys, means = zeros(2, 3, 2, head_dim, dtype=dtype), zeros(2, 3, 2, head_dim)
    matrix = zeros(head_dim, head_dim, dtype=bfloat16)
    code_leaving(keys, means, matrix, codes, scales, seats, begin)
    keys, values = zeros(2, 900, 2 * head_dim, dtype=dtype).split(head_dim, dim=2)
    centre(keys, means[0, 0], zeros(2, 4, head_dim))
    code_prompt(keys, means[0, 0], matrix, codes[0, 0], scales[0, 0])
    fit_values(keys, values, means[0, 0], means[1, 0], zeros(2, head_dim, head_dim, dtype=bfloat16))
    query, sinks = zeros(2, 2 * group, head_dim, dtype=dtype), zeros(2, 3, 2, 4, head_dim)[:, 1]
    index = codes[:, 1], scales[:, 1], sinks, seats, begin, end
    bit_score(query, matrix, *index, 0.1, 5000)
    bit_select(query, matrix, *index, end, 900, 5000, 0.1)
    fits = means[:, 1], means[:, 1], zeros(2, 3, 2, head_dim, head_dim, dtype=bfloat16)[:, 1]
    bit_rest(query, matrix, *index[:2], *fits, seats, begin, end, zeros(2, 2, 900, dtype=int64), 0.1)
# Wide heads of float32, of one KV head.
wide = zeros(1, 900, 256), zeros(1, 256), zeros(256, 256, dtype=bfloat16)
code_prompt(*wide, zeros(1, 900, 64, dtype=uint8), scales[0, 0, :1])
"""
ROWS = """
from gpu_worker.kernels.resolve.kernel import resolve
from gpu_worker.kernels.resolve.reference import Residency, SeatLanes
from gpu_worker.kernels.rows.fetch_kernel import fetch_misses, offsets_by_table, pool_rows
from gpu_worker.kernels.rows.kernel import gather_pairs, gather_rows, scatter_pairs, scatter_rows, store_token
from gpu_worker.kernels.rows.prompt_kernel import keep_rows, load_prompt, store_prompt
from gpu_worker.kernels.rows.reference import ArenaLayout
from gpu_worker.row_format import row_format

counts, bits = zeros(2, 2, dtype=int32), zeros(2, 2, 5000, dtype=uint8)
state = Residency(zeros(2, 2, 9000, dtype=int32), zeros(2, 2, 5000, dtype=int32), bits, counts, counts)
rows = SeatLanes(*torch.tensor([[0, 1], [5000, 4000], [4, 4], [8000, 8000]]))
for num_columns in 1, 300, 3000:
    resolve(state, rows, zeros(2, 2, num_columns, dtype=int64))
resolve(state, rows, zeros(2, 1, 1, dtype=int64).expand(2, 2, 1))
required, slots = zeros(2, 2, 300, dtype=int64), zeros(2, 2, 9, dtype=int64)
arena, table = zeros(1 << 20, dtype=uint8), zeros(2, 3, dtype=int32)
for dtype, head_dim in (bfloat16, 128), (float32, 96):
    pool, offsets = zeros(640, 2 * head_dim, dtype=dtype), zeros(2, 2, 9, dtype=int64)
    layout = ArenaLayout(1 << 18, 128, row_format(head_dim, dtype))
    gather_rows(arena, offsets, pool, slots)
    scatter_rows(arena, offsets, pool, slots.int())
    keys = zeros(2, 9, head_dim, dtype=dtype)
    gather_pairs(arena, offsets[0], keys, keys)
    scatter_pairs(arena, offsets[0], keys, keys)
    held, few = zeros(3, 4, 2, 100, dtype=int64), zeros(3, 4, 2, dtype=int32)
    store_prompt(zeros(1, 2, 9, 2 * head_dim, dtype=dtype), pool, zeros(3, 4, 2, 5, dtype=int64), 1, 2)
    load_prompt(zeros(2, 9, 2 * head_dim, dtype=dtype), pool, zeros(2, 5, dtype=int64))
    keep_rows(slots[0], keys, keys, pool, zeros(3, 4, 2, 5, dtype=int64), held, few, few, 1, 2, 3)
    store_token(keys, keys, pool, slots[0].int())
    store_token(keys, keys, pool, slots[0], arena, offsets[0])
    blocks, seats = zeros(2, 2, 100, dtype=int64), zeros(2, dtype=int64)
    pool_rows(blocks, seats, required, required.int())
    pool_rows(blocks, seats, required[:, :, :1], required[:, :, :1].int())
    for fetched in (None, seats) if dtype is bfloat16 else (seats,):
        out = required.int()
        fetch_misses(arena, layout, table, blocks, seats, required, required, required > 0, pool, out, fetched)
    offsets_by_table(table, seats, required, layout, 4)
"""
ACTIVATIONS = """
from gpu_worker.kernels.keep_allowed.kernel import keep_allowed
from gpu_worker.kernels.rms_norm.kernel import add_normed, rms_norm
from gpu_worker.kernels.rope.kernel import rope
from gpu_worker.kernels.silu_mul.kernel import silu_mul

# All forms of one type; of the other, which only loads and stores see, one or two.
for dtype in bfloat16, float32:
    hidden = zeros(3, 4096, dtype=dtype)
    if dtype is bfloat16:
        rms_norm(hidden, hidden[0], 1e-5)
        rms_norm(hidden, hidden[0], 1e-5, hidden)
    rms_norm(hidden, hidden[0], 1e-5, hidden, hidden[0])
    add_normed(hidden, hidden, hidden[0], 1e-5)
    silu_mul(zeros(3, 2 * 14336, dtype=dtype))
    norms = zeros(2, 128, dtype=dtype)
    for heads, head_dim, rotary_dim, interleaved, with_norms in (
        ((32, 8), 128, 128, False, ()), ((32, 8), 128, 128, False, (*norms, 1e-5)), ((7, 1), 96, 48, False, ()),
        ((32, 2), 128, 64, True, ()), ((14, 2), 64, 64, True, (*norms[:, :64], 1e-5)),
    )[: None if dtype is bfloat16 else 2]:
        table, columns = zeros(9, 2, rotary_dim, dtype=dtype), zeros(3, 3, dtype=int64)
        qkv = zeros(3, (heads[0] + 2 * heads[1]) * head_dim, dtype=dtype)
        rope(qkv, table, columns[:, 1], *heads, interleaved, *with_norms)
    # Of the last form, with keys and values side by side.
    rope(qkv, table, columns[:, 1], *heads, interleaved, rows=zeros(heads[1], 9, 2 * head_dim, dtype=dtype)[:, 1:4])
packed = zeros(2, 1 + 4008, dtype=int32)
keep_allowed(zeros(3, 128256), packed[:, 0], packed[:, 1:])
"""
PACKED = """
from gpu_worker.kernels.packed_matmul.kernel import packed_matmul, unpack_rows
from gpu_worker.kernels.quantise_rows.kernel import quantise_rows
from operations.packed import KINDS, drawn_matrix

for kind in KINDS:
    matrix = drawn_matrix(kind[0], 64, 512, *kind[1:])
    for rows in (1, 64) if kind in KINDS[:3] else (8,):
        packed_matmul(zeros(rows, 512, dtype=bfloat16), matrix)
    if kind in KINDS[2:4]:
        unpack_rows(matrix, 3, 60, bfloat16)
matrix = drawn_matrix("nibbles", 70, 300, 32, True)
packed_matmul(zeros(8, 300, dtype=float16), matrix, zeros(70, dtype=float16), zeros(8, 70, dtype=float16))
quantise_rows(zeros(3, 4096, dtype=bfloat16))
"""
# What decode steps and prompts launch, at the shapes of Llama-3.1-8B and SmolLM2-135M.
REAL = """
import torch
from torch import bfloat16, float16, int32, int64, uint8
from compile_rig import measure_only
spilled = measure_only()

from gpu_worker.kernels.attention.kernel import attend_blocks, attend_slots
from gpu_worker.kernels.join_pieces.kernel import join_pieces
from gpu_worker.kernels.observed_weight.kernel import observed_weight
from gpu_worker.kernels.rms_norm.kernel import rms_norm
from gpu_worker.kernels.rope.kernel import rope
from gpu_worker.kernels.silu_mul.kernel import silu_mul
from gpu_worker.kernels.top_k.kernel import top_k
from gpu_worker.policies.bitkeys.bit_rest.fit_kernel import fit_values
from gpu_worker.policies.bitkeys.bit_rest.kernel import bit_rest
from gpu_worker.policies.bitkeys.bit_select.kernel import bit_select
from gpu_worker.policies.bitkeys.key_bits.kernel import centre, code_leaving, code_prompt
from gpu_worker.policies.pqcache.pq_append.kernel import pq_append
from gpu_worker.policies.pqcache.pq_select.kernel import pq_select

# What is large is not touched, and takes no memory.
def empty(*shape, dtype=bfloat16):
    return torch.empty(shape, dtype=dtype)

for kv_heads, group, d, wide, lanes, n, chosen in (
    (8, 4, 128, 14336, 24, 32768, 2048), (8, 4, 128, 14336, 6, 131072, 2048), (3, 3, 64, 1536, 8, 8192, 819)
):
    heads, rows = kv_heads * group, (lanes, kv_heads)
    query, pool, seats = empty(lanes, heads, d), empty(4096, 2 * d), torch.arange(lanes)
    begin, end, counts = (torch.full((lanes,), number) for number in (4, n - 200, chosen))
    attend_slots(query, pool, empty(*rows, 256, dtype=int32), seats, empty(*rows, chosen, dtype=int32), 0.1)
    attend_blocks(query, pool, empty(*rows, n // 64, dtype=int64), seats, empty(*rows, dtype=int64), 0.1, n)
    join_pieces(torch.empty(8, heads, 1024), *[empty(1024, heads, d)] * 8)
    codes, scales = empty(*rows, n, d // 4, dtype=uint8), empty(*rows, n, dtype=float16)
    means, sinks, matrix = torch.empty(*rows, d), torch.empty(*rows, 4, d), empty(d, d)
    selected = bit_select(query, matrix, codes, scales, sinks, seats, begin, end, counts, chosen, n, 0.1)
    bit_rest(query, matrix, codes, scales, means, means, empty(*rows, d, d), seats, begin, end, selected, 0.1)
    layered = [each[:, None] for each in (means, codes, scales)]
    code_leaving(empty(lanes, 1, kv_heads, d), layered[0], matrix, *layered[1:], seats, begin)
    keys, values = empty(kv_heads, n, 2 * d).split(d, dim=2)
    centre(keys, means[0], sinks[0])
    code_prompt(keys, means[0], matrix, codes[0], scales[0])
    fit_values(keys, values, means[0], means[0], empty(kv_heads, d, d))
    index = torch.empty(*rows, 2, 64, d // 2), empty(*rows, n, 2, dtype=uint8), empty(*rows, 4096, dtype=int32)
    pq_select(query, *index, seats, begin, end, counts, chosen, n, 0.1)
    pq_append(empty(lanes, 1, kv_heads, d), *(each[:, None] for each in index), seats, begin)
    top_k(torch.empty(*rows, n), counts, chosen)
    observed_weight(empty(heads, 32, d), keys, empty(heads, 32, dtype=int64), torch.empty(heads, 32), 0.1)
    observed_weight(empty(heads, 32, d), keys, None, None, 0.1)
    hidden = empty(8192, heads * d)
    rms_norm(hidden, hidden[0], 1e-5, hidden)
    silu_mul(empty(8192, 2 * wide))
    rope(empty(8192, (heads + 2 * kv_heads) * d), empty(n, 2, d), empty(8192, dtype=int64), heads, kv_heads)
print(spilled)
"""


# Scripts, and the programs that each compiles; some share a process, which takes a while to begin.
SCRIPTS = {
    "attention_rows": (
        ATTENTION + TOP_K + ROWS + ACTIVATIONS + PACKED,
        "attend_split join_splits _join_pieces _join_past column_maxima prune finish select_in_tile take_best "
        "count_digit tally write_best resolve_head copy_rows copy_pairs store_rows _keep_rows _store_prompt "
        "_load_prompt find_rows list_misses copy_misses find_offsets _rms_norm _rope _silu_mul _keep_allowed "
        "multiply_split unpack_tile _quantise_row",
    ),
    "scores": (
        SCORES + PAIRS + BITS,
        "_tables _chunk_totals _weights _assign _products _starts _places _append "
        "_page_bound score_split weigh mark_chunk write_taken "
        "sum_keys write_means code_vectors code_tokens round_queries weigh_codes take_levels sum_up_rest "
        "sum_products join_products",
    ),
    "means_merging": (
        KMEANS + PROTOTYPES + SOFT_MATCHING + OBSERVED,
        "assign_tile move_one score_chunk sum_chunk sum_bucket add_votes spread_means "
        "match_chunk choose_edges merge_chunk split_log_sums join_log_sums sum_weights",
    ),
}


def test_no_program_is_left_out() -> None:
    programs, used = set(), set()
    for path in Path(gpu_worker.__file__).parent.rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef) and "triton.jit" in map(_name, function.decorator_list):
                names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
                own = {name.id for name in names if isinstance(name.ctx, ast.Store)} | {function.name}
                programs.add(function.name)
                used |= {name.id for name in names} - own
    compiled = {name for _, names in SCRIPTS.values() for name in names.split()}
    # Some are parts of others.
    assert programs - used == compiled


def _name(decorator: ast.expr) -> str:
    return ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU runs the kernels for real")
def test_programs_of_real_models_hardly_spill(tmp_path: Path) -> None:
    spilled = ast.literal_eval(run(REAL, tmp_path).strip().splitlines()[-1])
    # A few words of those that have a whole head in registers.
    assert {name: size for name, size in spilled.items() if size > 64} == {}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU runs the kernels for real")
@pytest.mark.parametrize("name", SCRIPTS)
def test_programs_compile(name: str, tmp_path: Path) -> None:
    script, programs = SCRIPTS[name]
    run(HEAD + script, tmp_path, DISABLE_LLVM_OPT="1")
    # What the wrappers launch came out as machine code.
    assert {path.stem for path in tmp_path.rglob("*.cubin") if path.stat().st_size} == {*programs.split()}


def run(script: str, cache: Path, **options: str) -> str:
    """In a process that compiles; what it prints."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), **options}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
