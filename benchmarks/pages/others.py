"""Tables of the hot cache, single kernels, the gateway, two nodes, and the rivals on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from statistics import median
from typing import Any

from benchmarks import tables
from benchmarks.commands.nodes import NodesRow
from benchmarks.figures import revive
from benchmarks.hitrate.paper_caches import CLUSTERS, PaperCacheRow
from benchmarks.hitrate.rates import HitRateCase, HitRateRow
from benchmarks.kernels.base import KernelRow
from benchmarks.load.gateway_cost import GatewayCost, GatewayRow
from benchmarks.pages.sources import content, rows
from benchmarks.pq_points import ALL, PointsRow
from benchmarks.report import cpu_table
from benchmarks.tables import Column
from carrel.evaluation.scoring import paired

HITRATE, PAPERS = "hitrate_nano_cpu", "hitrate_papers_nano_cpu"


def hot_cache() -> str:
    """Hit rates by the size of the hot cache; a star where it had to be raised to what is selected."""
    found: dict[HitRateCase, dict[float, HitRateRow]] = {}
    for row in rows(HitRateRow, HITRATE):
        found.setdefault(row.case, {})[row.cache_share] = row
    first = {case: next(iter(of.values())) for case, of in found.items()}

    def rate(share: float) -> Callable[[HitRateCase], str]:
        def text(case: HitRateCase) -> str:
            row = found[case][share]
            is_raised = row.cache_tokens > share * case.context + 1
            return f"{row.clock:.3f}{'*' if is_raised else ''}"

        return text

    columns: list[Column[HitRateCase]] = [
        Column("context", lambda case: tables.tokens(case.context)),
        Column("policy", lambda case: f"`{case.policy}`", False),
        Column("budget", lambda case: f"{100 * case.budget:g} %"),
        Column("selected", lambda case: str(first[case].num_selected)),
        Column("selected by the step before too", lambda case: f"{first[case].overlap:.2f}"),
    ]
    for share in (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2):
        columns.append(Column(f"C {Fraction(share)}", rate(share)))
    return tables.markdown(columns, list(found))


def paper_caches() -> str:
    """The papers' own caches against the same selections as the hot cache of a quarter of the context."""
    lines: list[tuple[str, str, float, float, float | None]] = []
    for fields in content(PAPERS)["rows"]:
        if "cache" not in fields:
            row = revive(HitRateRow, fields)
            if row.cache_share == 1 / 4:
                lines.append((row.case.policy, "the hot cache, C 1/4", row.cache_tokens, row.clock, None))
            continue
        own = revive(PaperCacheRow, fields)
        if own.cache.name == CLUSTERS:
            name = f"clusters, R = {own.cache.setting}"
        elif own.case.policy == "pqcache":
            name = f"{own.cache.name.upper()}, k_cache = {own.cache.setting}"
        else:
            continue  # PQCache's blocks are not ClusterKV's
        lines.append((own.case.policy, name, own.held_tokens, own.tokens, own.clusters))
    columns = (
        Column[tuple[str, str, float, float, float | None]]("policy", lambda line: f"`{line[0]}`", False),
        Column("cache", lambda line: line[1], False),
        Column("tokens held", lambda line: f"{line[2]:.0f}"),
        Column("tokens hit", lambda line: f"{line[3]:.3f}"),
        Column("clusters hit", lambda line: tables.number(line[4], 3)),
    )
    return tables.markdown(columns, sorted(lines, key=lambda line: line[0]))


def kernels() -> str:
    """Every kernel at its largest size."""
    largest = {row.op: row for row in sorted(rows(KernelRow, "kernels_h200"), key=lambda row: row.num_bytes)}
    columns = (
        Column[KernelRow]("kernel", lambda row: f"`{row.op}`", False),
        Column("size", lambda row: row.label, False),
        Column("us", lambda row: f"{row.us.median:,.1f}"),
        Column("TB/s", lambda row: f"{row.tb_per_s:.2f}"),
        Column("x a copy's rate", lambda row: f"{row.ceiling_share:.2f}"),
        Column("rival", lambda row: row.rival or "-", False),
        Column("x its speed", lambda row: tables.number(row.rival_ratio, 1)),
    )
    return tables.markdown(columns, sorted(largest.values(), key=lambda row: row.op))


def gateway() -> str:
    """Processor time of each part of a request."""
    cost = GatewayCost.of(*rows(GatewayRow, "gateway_cpu"))
    columns = (
        Column[tuple[str, str]]("part", lambda line: line[0], False),
        Column("processor time", lambda line: line[1]),
    )
    lines = [
        ("a request by itself", f"{cost.request_us / 1000:.1f} ms"),
        ("a token of its prompt", f"{cost.prompt_token_us:.1f} us"),
        ("a token of its answer, streamed", f"{cost.output_token_us:.0f} us"),
    ]
    return tables.markdown(columns, lines)


def nodes() -> str:
    """One node and two, on the same cores."""
    columns = (
        Column[NodesRow]("load", lambda row: row.load, False),
        Column("nodes", lambda row: str(row.setup.nodes)),
        Column("threads each", lambda row: str(row.setup.threads)),
        Column("affinity", lambda row: "on" if row.setup.affinity else "off", False),
        Column("tokens/s", lambda row: f"{row.output_tokens_per_s:.1f}"),
        Column("prompt tokens/s", lambda row: f"{row.prompt_tokens_per_s:.0f}"),
        Column("first token, ms", lambda row: tables.spread(row.ttft_ms, 0)),
        Column("of known tokens found", lambda row: tables.number(row.cached_share, 2)),
    )
    return tables.markdown(columns, rows(NodesRow, "nodes_cpu"))


def pq_points() -> str:
    """What PQ's training set costs the median head and the worst."""
    found = rows(PointsRow, "pq_points_nano_cpu")
    whole = {(row.trainer, row.tokens): row for row in found if row.points_per_centroid == ALL}

    def spread(values: list[float], worst: float) -> str:
        return f"{median(values):.3f} ({worst:.3f})"

    def less(row: PointsRow) -> str:
        mean = paired(*(dict(enumerate(of.recalls)) for of in (row, whole[row.trainer, row.tokens])))
        if mean is None or row.points_per_centroid == ALL:
            return "-"
        return f"{mean.value:+.3f} ({mean.low:+.3f} to {mean.high:+.3f})"

    columns = (
        Column[PointsRow]("keys", lambda row: f"{row.tokens:,}"),
        Column("heads", lambda row: str(len(row.recalls))),
        Column("trainer", lambda row: row.trainer, False),
        Column("points a centroid", lambda row: str(row.points_per_centroid or "all")),
        Column("seconds", lambda row: spread(row.cpu_seconds, max(row.cpu_seconds))),
        Column("error", lambda row: spread(row.errors, max(row.errors))),
        Column("recall", lambda row: spread(row.recalls, min(row.recalls))),
        Column("against all points", less),
    )
    return tables.markdown(columns, found)


def cpu_rivals() -> str:
    return cpu_table(content("cpu_vs_transformers"))


def faults() -> str:
    """What `make compose-test` saw when a container's process was killed."""
    columns = (
        Column[dict[str, Any]]("killed", lambda fault: fault["name"].removesuffix("-cpu"), False),
        Column("a running stream ended after", lambda fault: f"{fault['stream_ended_s']:.1f} s"),
        Column("with", lambda fault: f"`{fault['stream_error']}`", False),
        Column(
            "`/ready` in the meantime",
            lambda fault: ", ".join(str(status) if status else "no answer" for status in fault["statuses"]),
            False,
        ),
        Column("ready again after", lambda fault: f"{fault['ready_s']:.1f} s"),
    )
    return tables.markdown(columns, content("compose_cpu")["faults"])


def images() -> str:
    """Sizes of the images that `make compose-test` built."""
    built = content("compose_cpu")["images"]
    columns = (
        Column[dict[str, Any]]("image", lambda image: f"`{image['name']}`", False),
        Column("MB", lambda image: f"{image['bytes'] / 1e6:,.0f}"),
    )
    return tables.markdown(columns, sorted(built, key=lambda image: image["bytes"]))
