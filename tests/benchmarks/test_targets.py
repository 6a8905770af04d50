"""What `carrel bench decode` and `prefill` tell of the targets, and of which cases."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import decode_rows
from benchmarks.commands import prefill
from benchmarks.comparison import Outcome
from benchmarks.figures import DecodeCase, DecodeFigures, PrefillCase, PrefillFigures, Spread
from benchmarks.rivals import BASELINE, PREFILL
from benchmarks.shapes import SHAPES
from benchmarks.targets import Speedups, decode_verdicts

LLAMA = SHAPES["llama-3.1-8b"]
LONG = DecodeCase(LLAMA.name, "pqcache", 2048, 6, 131072, None, None, 50)
FULL = replace(LONG, policy="full", budget_tokens=None)


def figures(step_ms: float) -> DecodeFigures:
    return DecodeFigures(Spread(step_ms, step_ms, step_ms, 3), 1 << 30)


def test_targets_are_of_their_cases_only() -> None:
    def told(case: DecodeCase, ratio: float) -> list[str]:
        return list(decode_verdicts(case, Speedups(ratio, None)))

    assert "met, hoped for: reached" in told(LONG, 5.1)[0]
    assert "MISSED" in told(FULL, 0.9)[0]
    assert told(replace(LONG, shape="tiny"), 9.0) == []
    assert told(replace(LONG, hit_rate=0.9), 9.0) == []
    assert told(replace(LONG, trace="x.npz"), 9.0) == []


def test_chelsea_is_held_against_what_it_published() -> None:
    dense = replace(FULL, context=65536, batch=8)
    case = replace(dense, policy="chelsea", budget_tokens=13107)
    # Some steps compress again, which the median does not have.
    again = replace(figures(9.0), mean_ms=10.0)
    rows = decode_rows.rows_of(
        [
            Outcome(BASELINE, dense, figures(33.0)),
            Outcome("weights only", dense, figures(5.0)),
            Outcome("carrel", dense, figures(30.0)),
            Outcome("carrel", case, again),
        ]
    )
    ours = next(row for row in rows if row.case == case)
    assert ours.throughput_ratio == pytest.approx(3.3)
    assert ours.full_ratio == pytest.approx(3.0)
    assert [row.full_ratio for row in rows if row.rival != "carrel"] == [None, None]
    (_, told) = decode_rows.notes(rows)
    assert "3.00 times carrel full, 3.30 times the minimal dense loop (to beat: 3.19" in told
    assert "the weights alone allow 6.60 of the latter): MISSED" in told
    (told,) = decode_verdicts(case, Speedups(3.3, 3.2))
    assert told.endswith("Transformers): met")
    assert list(decode_verdicts(replace(case, budget_tokens=2048), Speedups(3.3, 3.2))) == []


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


def test_a_policy_s_own_work_is_held_against_the_targets() -> None:
    training, dense = "carrel index on gpu", PrefillCase(LLAMA.name, "full", None, 32768, None, 3)

    def outcome(policy: str, ttft: float, own: float, rival: str = training) -> Outcome:
        case = replace(dense, policy=policy, budget_tokens=6553)
        spreads = [Spread(ms, ms, ms, 3) for ms in (ttft, own, own / ttft)]
        measured = PrefillFigures(spreads[0], None, 1, own_ms=spreads[1], own_share=spreads[2])
        return Outcome(rival, case, measured)

    rows = prefill.rows_of(
        [
            Outcome(training, dense, PrefillFigures(Spread(1000.0, 1000.0, 1000.0, 3), None, 1)),
            outcome("snapkv", 1050.0, 20.0),
            outcome("protokv", 1060.0, 25.0),
            outcome("chelsea", 1200.0, 120.0),
            outcome("clusterkv", 1100.0, 80.0),
            # trained by the store's cores
            outcome("clusterkv", 1100.0, 0.1, rival="carrel"),
        ]
    )
    # The other rival was not asked for dense attention.
    assert [row.full_ratio for row in rows] == pytest.approx([1.0, 1.05, 1.06, 1.2, 1.1, None])
    chelsea, clusterkv, *protokv = prefill.notes(rows)
    assert "chelsea k=6553: 10.0 % of the time to the first token" in chelsea
    assert chelsea.endswith("(target: at most 8 %): MISSED")
    assert "clusterkv k=6553: 7.3 %" in clusterkv
    assert clusterkv.endswith("met")
    assert "1.25 times the policy time of snapkv" in protokv[0]
    assert "clusterkv takes 3.20 times its policy time (target: at least 3.9): MISSED" in protokv[1]
    assert len(protokv) == 2
