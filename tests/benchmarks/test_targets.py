"""What `carrel bench decode` and `prefill` tell of the targets, and of which cases."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.commands import prefill
from benchmarks.comparison import Outcome
from benchmarks.figures import DecodeCase, PrefillCase, PrefillFigures, Spread
from benchmarks.rivals import BASELINE, PREFILL
from benchmarks.shapes import SHAPES
from benchmarks.targets import decode_verdicts

LLAMA = SHAPES["llama-3.1-8b"]
LONG = DecodeCase(LLAMA.name, "pqcache", 2048, 6, 131072, None, None, 50)
FULL = replace(LONG, policy="full", budget_tokens=None)


def test_targets_are_of_their_cases_only() -> None:
    def told(case: DecodeCase, ratio: float) -> list[str]:
        return list(decode_verdicts(case, ratio))

    assert told(LONG, 3.6)[0].endswith("(target: at least 3.50): met")
    assert "MISSED" in told(FULL, 0.9)[0]
    assert told(replace(LONG, shape="tiny"), 9.0) == []
    assert told(replace(LONG, hit_rate=0.9), 9.0) == []


def test_the_wait_for_the_index_is_held_against_dense() -> None:
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
    assert next(iter(prefill.notes(rows))).endswith(
        "1.02 of the time to the second token of carrel full (target: at most 1.05): met"
    )
    assert prefill.cases_of(PREFILL.rivals[BASELINE], [case, dense]) == [dense]
