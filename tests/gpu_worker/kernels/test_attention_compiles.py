"""The attention kernels go through Triton's compiler for an H200, with what the wrappers pass."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

# The interpreter is chosen for a whole process, so this is another one.
SCRIPT = """
import torch
from compile_rig import compile_only
compile_only()
from gpu_worker.kernels.attention.kernel import attend_blocks, attend_slots

lengths = torch.ones(2, 2, dtype=torch.int64)
for dtype, group, head_dim in (torch.bfloat16, 4, 128), (torch.float16, 3, 96), (torch.float32, 7, 64):
    query, pool = torch.zeros(2, 2 * group, head_dim, dtype=dtype), torch.zeros(64, 2 * head_dim, dtype=dtype)
    for width in 1, 130:
        slots = torch.zeros(2, 2, width, dtype=torch.int64)
        attend_slots(query, pool, slots, 0.1)
        attend_blocks(query, pool, slots, lengths, 0.1)
    attend_slots(query, pool, slots, 0.1, torch.zeros(2, 2, 130))
    attend_blocks(query, pool, slots.int(), lengths[:, :1].expand(2, 2), 0.1, longest=1)
"""


def test_both_forms_compile(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("the GPU runs the kernels for real")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # Each wrapper's two kernels came out as machine code.
    names = {path.stem for path in tmp_path.rglob("*.cubin")}
    assert names == {"attend_split", "join_splits"}
