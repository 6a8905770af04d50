"""What a server does under load, beside vLLM's engine on a GPU of the same kind."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks import tables
from benchmarks.load.traffic import ClassRow
from benchmarks.pages.sources import content, rows
from benchmarks.tables import Column

DASH = "-"


@dataclass(frozen=True)
class Load:
    """A load as both servers had it. Texts; vLLM's figures are of its engine, without HTTP."""

    name: str
    what: str
    carrel: str
    default: str
    vllm: str


def under_load() -> str:
    """Chats alone and beside long prompts, these prompts, and a batch of equal ones."""
    columns = (
        Column[Load]("load", lambda load: load.name, False),
        Column[Load]("figure", lambda load: load.what, False),
        Column[Load]("Carrel, `--itl-target-ms 40`", lambda load: load.carrel),
        Column[Load]("Carrel, default", lambda load: load.default),
        Column[Load]("vLLM 0.24, no HTTP", lambda load: load.vllm),
    )
    return tables.markdown(columns, _loads())


def _loads() -> list[Load]:
    mixed = {row.traffic.name: row for row in rows(ClassRow, "serve_mixed_h200")}
    default = {row.traffic.name: row for row in rows(ClassRow, "serve_mixed_default_h200")}
    (alone,), (batch,) = rows(ClassRow, "serve_chats_h200"), rows(ClassRow, "serve_batch_h200")
    vllm = content("vllm_mixed_h200")["mixed"]
    beside, equal = vllm["chats beside long prompts"], vllm["16 x 16K, 8 at once"]
    chats, first = "chats beside 3 prompts of 100K", "first token, p50 / p95, ms"
    return [
        Load("chats of 512 tokens, 3 a second", first, _first(alone), DASH, _of(vllm["chats alone"], "ttft")),
        Load(chats, first, _first(mixed["chats"]), _first(default["chats"]), _of(beside, "ttft")),
        Load(
            chats, "gap, p50 / p95 / p99.9, ms", _gap(mixed["chats"]), _gap(default["chats"]), _gap_of(beside)
        ),
        Load(
            "these prompts",
            "last first token, s",
            _last(mixed["documents"]),
            _last(default["documents"]),
            f"{max(beside['long_ttft'][:3]):.1f}",
        ),
        Load(
            "16 prompts of 16K, 8 at once, `full`, target 2 s, chunks of 16,384",
            "tokens/s, made / of prompts",
            f"{batch.output_tokens_per_s:.0f} / {batch.prompt_tokens_per_s:,.0f}",
            DASH,
            f"{equal['tokens_s']:.0f} / {equal['prompt_tokens_s']:,.0f}",
        ),
        *(
            Load(
                f"a chat of 32K tokens, then its second turn, `{policy}`",
                "first token of each, ms",
                _turns(policy),
                DASH,
                DASH,
            )
            for policy in ("full", "snapkv", "auto")
        ),
    ]


def _first(row: ClassRow) -> str:
    assert row.ttft_ms is not None
    return f"{row.ttft_ms.p50:,.0f} / {row.ttft_ms.p95:,.0f}"


def _gap(row: ClassRow) -> str:
    assert row.gap_ms is not None
    assert row.gap_p999_ms is not None
    return f"{row.gap_ms.p50:.0f} / {row.gap_ms.p95:.0f} / {row.gap_p999_ms:.0f}"


def _gap_of(load: dict[str, dict[str, float]]) -> str:
    return " / ".join(f"{1000 * load['gap'][share]:.0f}" for share in ("0.5", "0.95", "0.999"))


def _last(row: ClassRow) -> str:
    """Of three, between the second and the last of which percentiles are interpolated."""
    assert row.ttft_ms is not None
    assert row.num_done == 3
    second = row.ttft_ms.p50
    return f"{(second + (row.ttft_ms.p99 - second) / 0.98) / 1000:.1f}"


def _turns(policy: str) -> str:
    """Medians of first and of later turns. Older JSON has one conversation of two, whose median is their mean."""
    (row,) = rows(ClassRow, f"serve_known_{policy}_h200")
    assert row.ttft_ms is not None
    assert row.later_ttft_ms is not None
    later = row.later_ttft_ms.p50
    first = row.first_ttft_ms.p50 if row.first_ttft_ms is not None else 2 * row.ttft_ms.p50 - later
    return f"{first:,.0f} / {later:,.0f}"


def _of(load: dict[str, dict[str, float]], name: str) -> str:
    return f"{1000 * load[name]['0.5']:,.0f} / {1000 * load[name]['0.95']:,.0f}"
