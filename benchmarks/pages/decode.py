"""Tables of decode steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from benchmarks import tables, targets
from benchmarks.commands.gather import GatherRow
from benchmarks.commands.prefill import PrefillRow
from benchmarks.decode_rows import DecodeRow
from benchmarks.figures import DecodeFigures
from benchmarks.pages.sources import rows
from benchmarks.rivals import BASELINE
from benchmarks.tables import Column

MAIN = "decode_h200"
OFFLOADED = ("decode_offload_h200", "decode_24gib_h200", "decode_trace_h200")
HIT_RATES = "decode_hit_rates_h200"
SECOND_TOKENS = ("prefill_cpu_index_8k_128k_h200", "prefill_cpu_index_32k_h200")
# what a step's kernels are for, by parts of their names
KERNELS = {
    "matrix products": ("nvjet", "cublasLt"),
    "attention over 2,048 tokens a head": ("attend_split", "join_splits"),
    "selection from PQ codes": ("mark_chunk", "write_taken"),
    "slots of the selected tokens": ("find_rows",),
    "norms, RoPE, SiLU, storing the new K\\|V pair": ("_rms_norm", "_rope", "_silu_mul", "store_rows"),
    "codes of the token that leaves the window": ("_append",),
}


@dataclass(frozen=True)
class Workload:
    """All rows of one context, batch and memory limit."""

    rows: tuple[DecodeRow, ...]

    @property
    def name(self) -> str:
        case = self.rows[0].case
        return f"{tables.tokens(case.context)} x {case.batch}"

    def of(self, rival: str, policy: str = "full") -> DecodeRow | None:
        return next((row for row in self.rows if (row.rival, row.case.policy) == (rival, policy)), None)

    def figures(self, rival: str, policy: str = "full") -> DecodeFigures:
        row = self.of(rival, policy)
        assert row, (self.name, rival, policy)
        assert row.figures, row
        return row.figures


def workloads(*names: str) -> list[Workload]:
    """The rows of these results, by workload and in their order."""
    found: dict[tuple[int, int, int | None], list[DecodeRow]] = {}
    for row in rows(DecodeRow, *names):
        case = row.case
        found.setdefault((case.context, case.batch, case.gpu_memory_limit), []).append(row)
    return [Workload(tuple(same)) for same in found.values()]


def steps() -> str:
    """Every token on the GPU: milliseconds a step."""
    columns: list[Column[Workload]] = [Column("context x batch", lambda at: at.name, False)]
    for heading, rival, policy in (
        ("minimal dense", BASELINE, "full"),
        ("weights only", "weights only", "full"),
        ("`full`", "carrel", "full"),
        ("`pqcache`", "carrel", "pqcache"),
    ):
        columns.append(Column(f"{heading}, ms", _ms(rival, policy)))
        if rival == "carrel":
            columns.append(Column("x dense", _ratio(policy)))
    return tables.markdown(columns, workloads(MAIN))


def throughput() -> str:
    """README's: tokens a second, with the cache on the GPU and in host memory."""
    columns = (
        Column[Workload]("context x requests", lambda at: at.name, False),
        Column("dense loop", lambda at: _rate(at.of(BASELINE))),
        Column("Carrel, `full`", lambda at: _rate_and_ratio(at.of("carrel"))),
        Column("Carrel, `pqcache`", lambda at: _rate_and_ratio(at.of("carrel", "pqcache"))),
    )
    return tables.markdown(columns, workloads(MAIN))


def offload() -> str:
    """Under a memory limit, selections replayed: what is found on the GPU, and what moves."""
    found = rows(DecodeRow, *OFFLOADED)
    dense = {_limit(row): row for row in found if row.rival == BASELINE}
    columns = (
        Column[DecodeRow](
            "context x requests", lambda row: f"{tables.tokens(row.case.context)} x {row.case.batch}", False
        ),
        Column("GPU memory, GiB", lambda row: f"{(_limit(row) or 0) / 2**30:.0f}"),
        Column("selections", lambda row: "recorded" if row.case.trace else "nine tenths repeat", False),
        Column("found on the GPU", _of(lambda figures: tables.number(figures.hit_rate, 2))),
        Column("MiB moved a step", _of(lambda figures: f"{figures.bytes_moved / 2**20:.0f}")),
        Column("ms a step", _of(lambda figures: tables.spread(figures.step_ms, 2))),
        Column("tokens/s", _rate),
        Column("dense loop, tokens/s", lambda row: _dense_of(dense.get(_limit(row)))),
        Column("x dense", lambda row: tables.number(row.throughput_ratio, 2)),
    )
    return tables.markdown(columns, [row for row in found if row.rival == "carrel"])


def hit_rates() -> str:
    """Under a memory limit, by the share of a selection that the step before had."""
    found = [row for row in rows(DecodeRow, HIT_RATES) if row.rival == "carrel"]
    rates = sorted({row.case.hit_rate or 0.0 for row in found})
    columns = [Column[float]("selected by the step before too", lambda rate: f"{rate:g}")]
    for policy in dict.fromkeys(row.case.policy for row in found):
        own = {row.case.hit_rate or 0.0: row for row in found if row.case.policy == policy}
        step_ms = _of(lambda figures: tables.number(figures.step_ms.median, 1))
        moved = _of(lambda figures: f"{figures.bytes_moved / 2**20:,.0f}")
        columns.append(Column(f"`{policy}`, ms", lambda rate, own=own, text=step_ms: text(own[rate])))
        columns.append(Column("MiB moved", lambda rate, own=own, text=moved: text(own[rate])))
    return tables.markdown(columns, rates)


def verdicts() -> str:
    """What the targets ask, and the worst case that they are about."""
    measured = rows(DecodeRow, MAIN, OFFLOADED[0])
    lines: list[tuple[str, str, str]] = []
    for target in targets.DECODE_TARGETS:
        ratios = [
            row.throughput_ratio
            for row in measured
            if row.rival == "carrel" and target.is_of(row.case) and row.throughput_ratio is not None
        ]
        where = "all cases" if target.context is None else f"{tables.tokens(target.context)} x {target.batch}"
        limited = ", within 80 GiB, nine tenths repeat" if target.is_limited else ""
        what = f"`{target.policy}`, {where}{limited}: throughput, x the dense loop"
        lines.append((what, f"{target.least:.2f}", f"{min(ratios):.2f}"))
    second = [
        row.tt2t_ratio
        for row in rows(PrefillRow, *SECOND_TOKENS)
        if row.case.policy == "pqcache" and row.case.context >= targets.LEAST_LONG and row.tt2t_ratio
    ]
    what = "`pqcache`, 32K and 128K: time to the second token, x `full`"
    lines.append((what, f"at most {targets.TT2T:.2f}", f"{max(second):.2f}"))
    gathered = [row.gb_per_s for row in rows(GatherRow, "gather_h200") if row.way == "gather kernel"]
    lines.append(("random rows of 512 bytes from host memory, GB/s", "40", f"{min(gathered):.0f}"))
    columns = (
        Column[tuple[str, str, str]]("target", lambda line: line[0], False),
        Column("asked", lambda line: line[1]),
        Column("reached", lambda line: line[2]),
    )
    return tables.markdown(columns, lines)


def transformers() -> str:
    """One sequence of 128K, against Hugging Face Transformers."""
    found = rows(DecodeRow, "decode_transformers_h200")
    full = next(row for row in found if (row.rival, row.case.policy) == ("carrel", "full"))
    columns = (
        Column[DecodeRow](
            "rival", lambda row: row.rival + (f" `{row.case.policy}`" if row.rival == "carrel" else ""), False
        ),
        Column("ms a step", _of(lambda figures: tables.spread(figures.step_ms, 1))),
        Column("x `full`", _of(lambda figures: f"{figures.ms_per_step / full.figures.ms_per_step:.2f}")),
    )
    return tables.markdown(columns, found)


def kernels() -> str:
    """Where a `pqcache` step goes: microseconds of each kind of kernel, over all layers."""
    shown = [at for at in workloads(MAIN) if at.name in ("32K x 24", "128K x 6")]
    profiles = [at.figures("carrel", "pqcache") for at in shown]

    def us(figures: DecodeFigures, parts: Iterable[str]) -> float:
        return sum(kernel.us for kernel in figures.kernels if any(part in kernel.name for part in parts))

    lines = [(name, [us(figures, parts) for figures in profiles]) for name, parts in KERNELS.items()]
    lines.append(("all kernels", [us(figures, [""]) for figures in profiles]))
    lines.append(("the step", [1000 * figures.ms_per_step for figures in profiles]))
    columns: list[Column[tuple[str, list[float]]]] = [Column("kernels", lambda line: line[0], False)]
    for place, at in enumerate(shown):
        columns.append(Column(at.name, lambda line, place=place: f"{line[1][place]:,.0f}"))
    return tables.markdown(columns, lines)


def retain() -> str:
    """Throughput with a fifth of the context kept, to that of the dense loop."""
    asked = {published.context: published.ratio for published in targets.CHELSEA_TABLE_3}
    columns = (
        Column[Workload]("context x requests", _limited_name, False),
        Column("dense loop, ms a step", lambda at: f"{at.figures(BASELINE).ms_per_step:.2f}"),
        Column("`full`", _ratio("full")),
        Column("`snapkv`", _ratio("snapkv")),
        Column("`chelsea`", _ratio("chelsea")),
        Column("published for Chelsea", lambda at: f"{asked[at.rows[0].case.context]:.2f}"),
    )
    limited = rows(DecodeRow, "decode_retain_130gib_h200")
    # one workload, though the dense loop has a smaller batch
    filled = Workload(tuple(sorted(limited, key=lambda row: row.rival != "carrel")))
    return tables.markdown(columns, [*workloads("decode_retain_batches_h200"), filled])


def _limited_name(at: Workload) -> str:
    limit, dense = _limit(at.rows[0]), at.of(BASELINE)
    if limit is None or dense is None:
        return at.name
    return f"{at.name}, within {limit / 2**30:.0f} GiB (dense: {dense.case.batch})"


def _limit(row: DecodeRow) -> int | None:
    return row.case.gpu_memory_limit


def _ms(rival: str, policy: str) -> Callable[[Workload], str]:
    return lambda at: tables.spread(at.figures(rival, policy).step_ms, 2)


def _ratio(policy: str) -> Callable[[Workload], str]:
    def text(at: Workload) -> str:
        row = at.of("carrel", policy)
        return tables.number(row.throughput_ratio if row else None, 2)

    return text


def _of(text: Callable[[DecodeFigures], str]) -> Callable[[DecodeRow], str]:
    return lambda row: "-" if row.figures is None else text(row.figures)


def _rate(row: DecodeRow | None) -> str:
    return "-" if row is None or row.tokens_per_s is None else f"{row.tokens_per_s:,.0f}"


def _rate_and_ratio(row: DecodeRow | None) -> str:
    return f"{_rate(row)} ({tables.number(row.throughput_ratio if row else None, 2)} x)"


def _dense_of(row: DecodeRow | None) -> str:
    return "-" if row is None else f"{_rate(row)} ({row.case.batch} fit)"
