"""Every kernel goes through Triton's compiler for an H200, with what its wrapper passes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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

lengths = torch.ones(2, 2, dtype=int64)
for dtype, group, head_dim in (bfloat16, 4, 128), (float16, 3, 96), (float32, 7, 64):
    query, pool = zeros(2, 2 * group, head_dim, dtype=dtype), zeros(64, 2 * head_dim, dtype=dtype)
    for width in 1, 130:
        slots = zeros(2, 2, width, dtype=int64)
        attend_slots(query, pool, slots, 0.1)
        attend_blocks(query, pool, slots, lengths, 0.1)
    attend_slots(query, pool, slots, 0.1, zeros(2, 2, 130))
    attend_blocks(query, pool, slots.int(), lengths[:, :1].expand(2, 2), 0.1, longest=1)
"""
TOP_K = """
from gpu_worker.kernels.top_k.kernel import top_k

for num_positions, width in (100, 7), (9000, 300), (40000, 2048):
    top_k(zeros(2, 3, num_positions), zeros(2, dtype=int64), width)
"""
SCORES = """
from gpu_worker.kernels.centroid_rank.kernel import centroid_rank
from gpu_worker.kernels.page_bound.kernel import page_bound
from gpu_worker.kernels.pq_score.assign_kernel import pq_assign
from gpu_worker.kernels.pq_score.kernel import pq_score

begin, end = zeros(2, dtype=int64), torch.full((2,), 4000)
for dtype, group, head_dim, parts in (bfloat16, 4, 128, 2), (float16, 3, 96, 4):
    query, codebooks = zeros(2, 2 * group, head_dim, dtype=dtype), zeros(2, 2, parts, 64, head_dim // parts)
    pq_score(query, codebooks, zeros(2, 2, 5000, parts, dtype=uint8), begin, end, 0.1)
    pq_assign(zeros(2, 2, 33, head_dim, dtype=dtype), codebooks)
    places = zeros(2, 2, 5000, dtype=int32)
    centroid_rank(query, zeros(2, 2, 100, head_dim), zeros(2, 2, 100, dtype=int32), places, places, begin, end)
    pages = zeros(2, 2, 300, head_dim, dtype=dtype)
    page_bound(query, pages, pages, begin, end)
"""
ROWS = """
from gpu_worker.kernels.resolve.kernel import resolve_on_device
from gpu_worker.kernels.resolve.reference import Residency, SeatRows
from gpu_worker.kernels.rows.kernel import fetch_misses, gather_pairs, gather_rows, scatter_pairs, scatter_rows
from gpu_worker.kernels.rows.reference import ArenaLayout

required = torch.arange(300).expand(2, 2, 300).contiguous()
state = Residency(
    zeros(2, 2, 9000, dtype=int32), zeros(2, 2, 5000, dtype=int32), zeros(2, 2, 5000, dtype=torch.bool),
    zeros(2, 2, dtype=int64),
)
rows = SeatRows.of([0, 1], [5000, 4000], [4, 4], [8000, 8000], required.device)
resolve_on_device(state, rows, required)
arena, table = zeros(1 << 20, dtype=uint8), zeros(2, 3, dtype=int32)
for dtype, head_dim in (bfloat16, 128), (float32, 96):
    pool, offsets = zeros(640, 2 * head_dim, dtype=dtype), zeros(2, 2, 9, dtype=int64)
    layout = ArenaLayout(1 << 18, 128, pool.shape[1] * pool.element_size())
    some = zeros(2, 2, 9, dtype=int64)
    gather_rows(arena, offsets, pool, some)
    scatter_rows(arena, offsets, pool, some)
    keys = zeros(2, 9, head_dim, dtype=dtype)
    gather_pairs(arena, offsets[0], keys, keys)
    scatter_pairs(arena, offsets[0], keys, keys)
    blocks, seats = zeros(2, 2, 100, dtype=int64), zeros(2, dtype=int64)
    fetch_misses(arena, layout, table, blocks, seats, required, required, required > 0, pool)
"""
ACTIVATIONS = """
from gpu_worker.kernels.rms_norm.kernel import rms_norm
from gpu_worker.kernels.silu_mul.kernel import silu_mul

for dtype in bfloat16, float16:
    hidden = zeros(3, 4096, dtype=dtype)
    rms_norm(hidden, hidden[0], 1e-5)
    rms_norm(hidden, hidden[0], 1e-5, hidden)
    silu_mul(zeros(3, 2 * 14336, dtype=dtype))
"""


@pytest.mark.parametrize(
    ("script", "programs"),
    [
        (ATTENTION, {"attend_split", "join_splits"}),
        (TOP_K, {"column_maxima", "prune", "finish", "select_in_tile"}),
        (
            SCORES,
            {
                "_tables",
                "_chunk_totals",
                "_weights",
                "_assign",
                "_products",
                "_starts",
                "_places",
                "_page_bound",
            },
        ),
        (ROWS, {"look_up", "count", "take", "_copy_rows", "_copy_pairs", "_fetch"}),
        (ACTIVATIONS, {"_rms_norm", "_silu_mul"}),
    ],
    ids=["attention", "top_k", "scores", "rows", "activations"],
)
def test_programs_compile(tmp_path: Path, script: str, programs: set[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("the GPU runs the kernels for real")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", HEAD + script], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    # What the wrappers launch came out as machine code.
    assert {path.stem for path in tmp_path.rglob("*.cubin")} == programs
