"""Tables of prompts: time to the first and to the second token."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks import tables
from benchmarks.commands.prefill import PrefillRow
from benchmarks.figures import PrefillFigures
from benchmarks.pages.decode import SECOND_TOKENS
from benchmarks.pages.sources import rows
from benchmarks.tables import Column

Rows = dict[tuple[int, str], PrefillRow]
SHORT, LONG = 32768, 131072
OWN_WORK = (
    "prefill_policies_h200",
    "prefill_policies_128k_h200",
    "prefill_policies_128k_heavy_h200",
    "prefill_policies_128k_rest_h200",
    "prefill_policies_128k_infllm_h200",
)


def second_token() -> str:
    """`pqcache` with its index trained by the store, beside `full`."""
    found = _by_policy(*SECOND_TOKENS)
    contexts = sorted({context for context, _ in found})

    def of(policy: str, text: Callable[[PrefillFigures], str]) -> Callable[[int], str]:
        return lambda context: text(_figures(found[context, policy]))

    columns = (
        Column[int]("context", tables.tokens),
        Column("`full`: TTFT, ms", of("full", lambda figures: _thousands(figures.ttft_ms.median))),
        Column("TT2T, ms", of("full", _second)),
        Column("`pqcache`: TTFT, ms", of("pqcache", lambda figures: _thousands(figures.ttft_ms.median))),
        Column("TT2T, ms", of("pqcache", _second)),
        Column("TT2T, x `full`", lambda context: tables.number(found[context, "pqcache"].tt2t_ratio, 2)),
        Column(
            "waited for an index, ms", of("pqcache", lambda figures: _thousands(figures.unhidden_ms or 0))
        ),
        Column("K-means iterations", of("pqcache", _iterations)),
    )
    return tables.markdown(columns, contexts)


def own_work() -> str:
    """What each method does with a prompt, a fifth kept or attended, indexes trained on the GPU."""
    found = _by_policy(*OWN_WORK)
    shared = [policy for context, policy in found if context == SHORT and (LONG, policy) in found]
    measured = [policy for policy in shared if _figures(found[SHORT, policy]).own_ms is not None]
    columns: list[Column[str]] = [Column("method", lambda policy: f"`{policy}`", False)]
    for context in (SHORT, LONG):
        columns += [
            Column(f"{tables.tokens(context)}: policy time, ms", _own_ms(found, context)),
            Column("share of TTFT", _own_share(found, context)),
            Column("TTFT, x `full`", _ratio(found, context)),
        ]
    ordered = sorted(measured, key=lambda policy: _median_own(found, SHORT, policy))
    return tables.markdown(columns, ordered)


def _by_policy(*names: str) -> Rows:
    return {(row.case.context, row.case.policy): row for row in rows(PrefillRow, *names) if row.figures}


def _figures(row: PrefillRow) -> PrefillFigures:
    assert row.figures is not None, row
    return row.figures


def _median_own(found: Rows, context: int, policy: str) -> float:
    own = _figures(found[context, policy]).own_ms
    return own.median if own else 0.0


def _own_ms(found: Rows, context: int) -> Callable[[str], str]:
    def text(policy: str) -> str:
        own = _median_own(found, context, policy)
        return f"{own:.1f}" if own < 100 else _thousands(own)

    return text


def _own_share(found: Rows, context: int) -> Callable[[str], str]:
    def text(policy: str) -> str:
        share = _figures(found[context, policy]).own_share
        return f"{100 * share.median:.1f} %" if share else "-"

    return text


def _ratio(found: Rows, context: int) -> Callable[[str], str]:
    return lambda policy: tables.number(found[context, policy].full_ratio, 2)


def _second(figures: PrefillFigures) -> str:
    return _thousands(figures.tt2t_ms.median) if figures.tt2t_ms else "-"


def _iterations(figures: PrefillFigures) -> str:
    made = sorted({span.iterations for span in figures.indexes if span.iterations is not None})
    if not made:
        return "-"
    return f"{made[0]}" if len(made) == 1 else f"{made[0]} to {made[-1]}"


def _thousands(value: float) -> str:
    return f"{value:,.0f}"
