"""`carrel bench kernels` at tiny sizes: every case's reference is right, and a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Command

import gpu_worker
from benchmarks.commands.kernels import OPS, cases_of
from benchmarks.commands.options import Workload
from benchmarks.kernels.base import (
    Ceilings,
    KernelCase,
    Operands,
    Setting,
    load,
    measure,
    mismatch,
    relative_error,
)
from benchmarks.pages import render
from benchmarks.shapes import SHAPES
from benchmarks.timing import in_turn, time_steps

CPU = torch.device("cpu")
SETTING = Setting(SHAPES["tiny"], (Workload(64, 1), Workload(96, 3)), 16, CPU, torch.float32)


@pytest.mark.parametrize("op", OPS)
def test_every_case_calls_and_checks(op: str) -> None:
    cases = list(cases_of(op, SETTING))
    assert len({case.label for case in cases}) == len(cases) >= 2
    for case in cases:
        operands = case.make()
        operands.call()
        assert operands.error is not None
        # Fused attention is its definition but for rounding; all others are the reference itself.
        assert operands.error() == pytest.approx(0, abs=1e-6)
        assert (operands.rival is None) == (case.rival is None)
        assert case.num_bytes > 0
        if operands.rival is not None:
            operands.rival()


def test_every_kernel_has_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: set[str] = set()

    def seen(op: str, name: str, module: str = "reference") -> Callable[..., Any]:
        measured.add(op)
        return load(op, name, module)

    monkeypatch.setattr("benchmarks.kernels.base.load", seen)
    for op in OPS:
        list(cases_of(op, SETTING))
    (folder,) = gpu_worker.__path__
    packages = (file.parent.relative_to(folder).parts for file in Path(folder).rglob("reference.py"))
    assert measured == {".".join(parts) for parts in packages}


def test_a_kernel_never_stands_for_a_reference() -> None:
    assert SETTING.implementation("kernels.top_k", "top_k") is load("kernels.top_k", "top_k")
    triton = pytest.importorskip("triton")
    assert triton
    on_a_gpu = Setting(SHAPES["tiny"], (), 16, torch.device("cuda"), torch.bfloat16)
    assert on_a_gpu.implementation("kernels.top_k", "top_k").__module__ == "gpu_worker.kernels.top_k.kernel"


def test_an_error_is_seen() -> None:
    (case, *_) = cases_of("silu_mul", SETTING)
    right = case.make()
    wrong = Operands(right.call, right.rival, lambda: relative_error(torch.ones(3), torch.full((3,), 2.0)))
    row = measure(replace(case, make=lambda: wrong), CPU, Ceilings(1.0, 0.5), is_warm=True)
    assert row.error == pytest.approx(0.5)
    assert row.ceiling_share == row.tb_per_s
    infinite = torch.tensor([1.0, float("-inf")])
    assert relative_error(infinite, infinite) == 0
    assert mismatch(torch.tensor([1, 2]), torch.tensor([1, 3])) == 0.5


def test_calls_take_turns() -> None:
    seen: list[int] = []
    call = in_turn([lambda value=value: seen.append(value) for value in range(3)])
    for _ in range(5):
        call()
    assert seen == [0, 1, 2, 0, 1]


def test_what_prepares_a_step_is_not_timed() -> None:
    steps: list[int] = []
    spread = time_steps(lambda: None, 4, CPU, before=steps.append)
    assert spread.n == 4
    assert steps == list(range(7))


def test_a_run_writes_a_table_and_json(
    tmp_path: Path, bench: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.commands.kernels.copy_ceilings", lambda device: Ceilings(1.0, 0.5))
    path = tmp_path / "result.json"
    argv = ["kernels", "--model-shape", "tiny", "--budget", "16", "--workloads", "64x1", "--ops", "top_k"]
    table = bench.output(*argv, "--device", "cpu", "--json", path)
    assert "| top_k | 2 x 64" in table
    assert json.loads(path.read_text())["benchmark"] == "kernels"
    assert table.strip() in render(path)


def test_a_kernel_that_fails_does_not_cost_the_others(
    tmp_path: Path, bench: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cases(op: str, setting: Setting) -> list[KernelCase]:
        (good, *_) = cases_of("silu_mul", setting)
        return [replace(good, op="broken", make=lambda: 1 // 0), good]

    monkeypatch.setattr("benchmarks.commands.kernels.copy_ceilings", lambda device: Ceilings(1.0, 0.5))
    monkeypatch.setattr("benchmarks.commands.kernels.cases_of", cases)
    path = tmp_path / "result.json"
    argv = ("kernels", "--model-shape", "tiny", "--device", "cpu", "--ops", "silu_mul", "--json", path)
    ended = bench(*argv)
    assert (ended.code, "- broken 1 x 128: ZeroDivisionError" in ended.out) == (1, True)
    assert [row["op"] for row in json.loads(path.read_text())["rows"]] == ["silu_mul"]
