"""`carrel bench decode` and `prefill`: which cases each rival gets, ratios, targets, and one whole run of each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Command

from benchmarks import comparison, decode_rows
from benchmarks.commands import decode, prefill
from benchmarks.comparison import Outcome
from benchmarks.figures import DecodeCase, DecodeFigures, PrefillCase, PrefillFigures, Spread
from benchmarks.pages import render
from benchmarks.rivals import BASELINE, DECODE, PREFILL
from benchmarks.shapes import SHAPES

LLAMA = SHAPES["llama-3.1-8b"]
LONG = DecodeCase(LLAMA.name, "pqcache", 2048, 6, 131072, None, None, 50)
FULL = replace(LONG, policy="full", budget_tokens=None)


def figures(step_ms: float) -> DecodeFigures:
    return DecodeFigures(Spread(step_ms, step_ms, step_ms, 3), 1 << 30)


def test_a_dense_rival_gets_each_case_once_without_policy() -> None:
    asked = [FULL, LONG, replace(LONG, hit_rate=0.9), replace(LONG, quantization="fp8")]
    assert decode.cases_of(DECODE.rivals[BASELINE], asked, LLAMA, torch.bfloat16) == [FULL]
    assert decode.cases_of(DECODE.rivals["carrel"], asked, LLAMA, torch.bfloat16) == asked


def test_a_dense_rival_takes_the_largest_batch_that_fits_the_limit() -> None:
    limited = replace(LONG, gpu_memory_limit=80 << 30)
    (case,) = decode.cases_of(DECODE.rivals[BASELINE], [limited], LLAMA, torch.bfloat16)
    # 15 GiB of weights, 16 GiB for each sequence
    assert case == replace(FULL, batch=4, gpu_memory_limit=80 << 30)
    assert decode.cases_of(DECODE.rivals["carrel"], [limited], LLAMA, torch.bfloat16) == [limited]
    (small,) = decode.cases_of(
        DECODE.rivals[BASELINE], [replace(limited, gpu_memory_limit=1)], LLAMA, torch.bfloat16
    )
    assert small.batch == 1


def test_a_slow_rival_gets_small_batches_and_few_steps() -> None:
    asked = [FULL, replace(FULL, batch=1)]
    (case,) = decode.cases_of(DECODE.rivals["transformers offloaded"], asked, LLAMA, torch.bfloat16)
    assert (case.batch, case.steps) == (1, 4)


def test_ratios_are_to_the_dense_loop_of_the_same_case() -> None:
    other = replace(FULL, batch=1)
    rows = decode_rows.rows_of(
        [
            Outcome("carrel", LONG, figures(10.0)),
            Outcome("carrel", replace(LONG, batch=2), figures(10.0)),
            Outcome(BASELINE, FULL, figures(30.0)),
            Outcome(BASELINE, other, figures(5.0)),
            Outcome("carrel", FULL, error="broken\nOutOfMemoryError"),
        ]
    )
    ratios = {(row.rival, str(row.case)): row.throughput_ratio for row in rows}
    assert ratios["carrel", str(LONG)] == pytest.approx(3.0)
    assert ratios[BASELINE, str(FULL)] == 1.0
    # no dense loop had this batch
    assert ratios["carrel", str(replace(LONG, batch=2))] is None
    assert [row.case.batch for row in rows] == [1, 2, 6, 6, 6]
    (told,) = decode_rows.notes(rows)
    assert told.endswith("full: OutOfMemoryError")


def test_under_a_limit_the_smaller_dense_batch_counts() -> None:
    limited = replace(LONG, gpu_memory_limit=80 << 30, hit_rate=0.9)
    dense = replace(FULL, gpu_memory_limit=80 << 30, batch=4)
    rows = decode_rows.rows_of(
        [Outcome(BASELINE, dense, figures(20.0)), Outcome("carrel", limited, figures(10.0))]
    )
    ours = next(row for row in rows if row.rival == "carrel")
    assert ours.throughput_ratio == pytest.approx(3.0)
    assert ours.baseline_batch == 4


def test_prompts_are_compared_with_the_same_under_dense_attention() -> None:
    case = PrefillCase(LLAMA.name, "pqcache", 2048, 32768, None, 3)
    dense = replace(case, policy="full", budget_tokens=None)

    def of(ttft: float, tt2t: float | None) -> PrefillFigures:
        first, second = (None if ms is None else Spread(ms, ms, ms, 3) for ms in (ttft, tt2t))
        assert first is not None
        return PrefillFigures(first, second, 1)

    rows = prefill.rows_of(
        [
            Outcome(BASELINE, dense, of(1000.0, None)),
            Outcome("carrel", dense, of(1100.0, 1200.0)),
            Outcome("carrel", case, of(1100.0, 1230.0)),
        ]
    )
    assert [row.ttft_ratio for row in rows] == pytest.approx([1.0, 1.1, 1.1])
    assert rows[2].tt2t_ratio == pytest.approx(1.025)
    assert prefill.cases_of(PREFILL.rivals[BASELINE], [case, dense]) == [dense]


def test_a_budget_is_a_share_of_each_context_or_tokens(
    monkeypatch: pytest.MonkeyPatch, bench: Command
) -> None:
    asked: list[PrefillCase | DecodeCase] = []

    def measured(_contest: object, plan: dict[str, list[PrefillCase | DecodeCase]], *_rest: object) -> list:
        asked.extend(plan["carrel"])
        return []

    monkeypatch.setattr("benchmarks.commands.prefill.measure_rivals", measured)
    monkeypatch.setattr("benchmarks.commands.decode.measure_rivals", measured)
    common = ["--device", "cpu", "--rivals", "carrel", "--policies", "full", "chelsea", "--budget"]
    bench.output("prefill", "--contexts", "32K", "128K", *common, "0.2")
    bench.output("decode", "--workloads", "64Kx8", *common, "0.2")
    bench.output("prefill", "--contexts", "32K", *common, "2K")
    assert [case.budget_tokens for case in asked] == [None, 6553, None, 26214, None, 13107, None, 2048]


@pytest.mark.parametrize(
    ("name", "workload", "policy"),
    [
        # chelsea compresses again, which only decoding tells apart
        ("decode", ["--workloads", "256x2", "--steps", "2"], "chelsea"),
        ("prefill", ["--contexts", "256"], "snapkv"),
    ],
)
def test_policies_are_run_side_by_side(
    name: str, workload: list[str], policy: str, tmp_path: Path, bench: Command
) -> None:
    path = tmp_path / "out.json"
    argv = [name, "--model-shape", "tiny", "--device", "cpu", "--rivals", BASELINE, "carrel"]
    argv += ["--policies", "full", policy, "--budget", "0.2", *workload]
    table = bench.output(*argv, "--json", path)
    assert f"| {BASELINE} | full |" in table
    assert table.strip() in render(path)
    content = json.loads(path.read_text())
    rows = [row for row in content["rows"] if row["rival"] == "carrel"]
    assert [row["case"]["budget_tokens"] for row in rows] == [None, 51]
    assert all(row["full_ratio"] > 0 for row in rows)
    assert content["benchmark"] == name
    assert content["about"]["command"].startswith(f"carrel bench {name} --model-shape tiny")
    if name == "decode":
        assert [row["figures"]["mean_ms"] is None for row in rows] == [True, False]


def test_a_run_that_is_cut_off_keeps_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bench: Command
) -> None:
    """The second of two cases ends the program. A half-written file never exists."""
    json_path, figures = tmp_path / "decode.json", DecodeFigures(Spread(1.0, 1.0, 1.0, 1), 1)

    def outcomes(contest: Any, name: str, cases: Any, shape: str, device: str) -> Iterator[Any]:
        yield Outcome(name, cases[0], figures)
        raise KeyboardInterrupt

    monkeypatch.setattr(comparison, "_outcomes", outcomes)
    argv = ["decode", "--model-shape", "tiny", "--device", "cpu", "--rivals", "carrel", "--policies", "full"]
    assert bench(*argv, "--workloads", "64x1", "64x2", "--json", json_path).code == 130
    (row,) = json.loads(json_path.read_text())["rows"]
    assert row["case"]["batch"] == 1
    assert list(tmp_path.iterdir()) == [json_path]


def test_what_cannot_be_run_is_one_line(bench: Command) -> None:
    error = bench.refusal("decode", "--rivals", "nobody", "--device", "cpu", code=1)
    assert error.startswith("carrel bench decode: error: no rival nobody")
    assert error.count("\n") == 1
