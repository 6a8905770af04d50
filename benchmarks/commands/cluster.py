"""`carrel bench cluster`: a model of 1 to 512 GPUs from figures of one. It measures nothing."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import plots, tables
from benchmarks.cluster_model.figures import ClusterRow
from benchmarks.cluster_model.measured import read_measured
from benchmarks.cluster_model.parameters import MIXES, ClusterParameters, Mix, Routing
from benchmarks.cluster_model.simulation import ClusterCase
from benchmarks.cluster_model.study import Study
from benchmarks.commands.options import add_output, finish, share
from benchmarks.figures import revive
from benchmarks.load.levels import Percentiles
from benchmarks.progress import RunProgress
from benchmarks.tables import Column
from carrel.process.command_line import at_least

BASE_ROUTING = Routing.AFFINITY

CASE_COLUMNS: tuple[Column[ClusterRow], ...] = (
    Column("mix", lambda row: row.case.mix.name, False),
    Column("routing", lambda row: str(row.case.routing), False),
    Column("policy", lambda row: row.case.policy, False),
    Column("GPUs", lambda row: str(row.case.num_gpus)),
    Column("gateways", lambda row: str(row.case.num_gateways)),
)
MOST_COLUMNS: tuple[Column[ClusterRow], ...] = (
    *CASE_COLUMNS,
    Column("requests/s", lambda row: f"{row.requests_per_s:.2f}"),
    Column("tokens/s", lambda row: f"{row.tokens_per_s:.0f}"),
    Column("a GPU", lambda row: f"{row.tokens_per_s / row.case.num_gpus:.0f}"),
    Column("reused", lambda row: f"{row.reused:.2f}"),
    Column("decoding", lambda row: f"{row.used.decode:.2f}"),
    Column("seats", lambda row: f"{row.used.seats:.2f}"),
    Column("GPU slots", lambda row: f"{row.used.gpu_memory:.2f}"),
    Column("host, GiB a GPU", lambda row: f"{row.host_gib_per_gpu:.0f}"),
    Column("gateway cores", lambda row: f"{row.gateways_needed:.1f}"),
    Column("saturates", lambda row: row.saturates, False),
)
LOAD_COLUMNS: tuple[Column[ClusterRow], ...] = (
    *CASE_COLUMNS,
    Column("load", lambda row: f"{row.case.load:.0%}"),
    Column("tokens/s", lambda row: f"{row.tokens_per_s:.0f}"),
    Column("TTFT p50/p95/p99, s", lambda row: _percentiles(row.ttft_s, 1)),
    Column("of chats, s", lambda row: _percentiles(row.chat_ttft_s, 1)),
    Column("TPOT p50/p95/p99, ms", lambda row: _percentiles(row.tpot_ms, 1)),
    Column("most wait for", lambda row: row.saturates, False),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gpus",
        nargs="+",
        type=at_least(1),
        default=[1, 8, 64, 512],
        metavar="N",
        help="default: 1 8 64 512",
    )
    parser.add_argument(
        "--mixes",
        nargs="+",
        choices=list(MIXES),
        default=list(MIXES),
        metavar="NAME",
        help=f"{', '.join(MIXES)} (default: all)",
    )
    parser.add_argument(
        "--repeated",
        type=share,
        default=None,
        metavar="SHARE",
        help="of the requests that repeat a known prefix, in every mix (default: the mix's own)",
    )
    parser.add_argument(
        "--policies",
        nargs="+",
        choices=["full", "pqcache"],
        default=["pqcache", "full"],
        metavar="NAME",
        help="full, pqcache: of which there are committed figures (default: both)",
    )
    parser.add_argument(
        "--loads",
        nargs="*",
        type=share,
        default=[0.5, 0.7, 0.9],
        metavar="SHARE",
        help="of what the cluster can do, for times (default: 0.5 0.7 0.9)",
    )
    parser.add_argument(
        "--requests-per-gpu",
        type=at_least(1),
        default=200,
        metavar="N",
        help="simulated in each run (default: %(default)s)",
    )
    parser.add_argument(
        "--least-requests",
        type=at_least(1),
        default=8000,
        metavar="N",
        help="in each run, however few GPUs (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="default: %(default)s")
    add_output(parser)


def run(options: argparse.Namespace) -> int:
    """Raises BenchmarkError."""
    parameters = ClusterParameters()
    measured = {policy: read_measured(policy, parameters) for policy in options.policies}
    cases = list(cases_of(options, parameters))
    rows: list[ClusterRow] = []
    with RunProgress(len(cases)) as progress:
        for case in cases:
            progress.doing(str(case))
            study = Study(
                measured[case.policy],
                parameters,
                options.requests_per_gpu,
                options.seed,
                options.least_requests,
            )
            found = list(study.rows(case, tuple(options.loads)))
            progress.done(f"{case}: {found[0].tokens_per_s:.0f} tokens/s, {found[0].saturates}")
            rows += found
    model = {
        "kind": "a model: simulated, not measured",
        "seed": options.seed,
        "requests_per_gpu": options.requests_per_gpu,
        "least_requests": options.least_requests,
        "measured": {policy: asdict(figures) for policy, figures in measured.items()},
        "assumed": asdict(parameters),
        "mixes": {
            mix.name: {**asdict(mix), "kinds": [asdict(kind) for kind in mix.kinds]}
            for mix in _mixes(options)
        },
    }
    finish(options, "cpu", model, tuple(rows))
    tables.show("cluster (a model)", MOST_COLUMNS, _most(rows), notes(rows))
    if options.loads:
        print()
        tables.show("times by load (a model)", LOAD_COLUMNS, _loaded(rows))
    if options.plots:
        draw(rows, options.plots)
    return 0


def cases_of(options: argparse.Namespace, parameters: ClusterParameters) -> Iterator[ClusterCase]:
    """Every mix and policy by affinity; the other routings, and one gateway for all, of the base only."""
    mixes = _mixes(options)
    for mix in mixes:
        for policy in options.policies:
            is_base = mix is mixes[0] and policy == options.policies[0]
            for num_gpus in options.gpus:
                num_gateways = parameters.gateways_per_node * -(-num_gpus // parameters.gpus_per_node)
                for routing in Routing if is_base else (BASE_ROUTING,):
                    yield ClusterCase(num_gpus, num_gateways, mix, routing, policy)
                if policy == options.policies[0]:
                    yield ClusterCase(num_gpus, 1, mix, BASE_ROUTING, policy)


def _mixes(options: argparse.Namespace) -> list[Mix]:
    named = [MIXES[name] for name in options.mixes]
    if options.repeated is None:
        return named
    return [Mix(mix.name, mix.shares, options.repeated, mix.answers) for mix in named]


def notes(rows: Sequence[ClusterRow]) -> Iterable[str]:
    yield "Simulated from figures of one GPU: nothing here was measured on more than one."
    for name, row in _widest(rows).items():
        what = f"{row.case.num_gpus} GPUs do {row.tokens_per_s:.0f} tokens/s"
        yield f"{name}: {what}; {row.saturates} saturates first."


def render(content: dict[str, Any]) -> str:
    rows = [revive(ClusterRow, fields) for fields in content["rows"]]
    most = tables.markdown(MOST_COLUMNS, _most(rows), notes(rows))
    loaded = _loaded(rows)
    return f"{most}\n\n{tables.markdown(LOAD_COLUMNS, loaded)}" if loaded else most


def draw(rows: Sequence[ClusterRow], folder: Path) -> None:
    """One picture: what a GPU does among others, of what the first number of them does; 1 is perfect."""
    series: plots.Series = {}
    for row in _most(rows):
        case = row.case
        if case.policy != rows[0].case.policy:
            continue
        words = [case.mix.name, *([] if case.routing == BASE_ROUTING else [str(case.routing)])]
        words += ["one gateway"] if case.num_gateways == 1 else []
        point = (case.num_gpus, row.tokens_per_s / case.num_gpus)
        series.setdefault(", ".join(words), []).append(point)
    shares = {
        name: [(num_gpus, value / points[0][1]) for num_gpus, value in points]
        for name, points in series.items()
    }
    y_label = "tokens/s of a GPU, of what one does alone (a model)"
    plots.lines(folder / "cluster_model.png", "GPUs", y_label, shares, tick=lambda x: f"{x:g}")


def _widest(rows: Sequence[ClusterRow]) -> dict[str, ClusterRow]:
    """Of each mix, the most GPUs with gateways enough."""
    found: dict[str, ClusterRow] = {}
    for row in _most(rows):
        case = row.case
        if case.policy == rows[0].case.policy and case.routing == BASE_ROUTING and case.num_gateways > 1:
            found[case.mix.name] = row
    return found


def _most(rows: Sequence[ClusterRow]) -> list[ClusterRow]:
    return [row for row in rows if row.case.load is None]


def _loaded(rows: Sequence[ClusterRow]) -> list[ClusterRow]:
    return [row for row in rows if row.case.load is not None]


def _percentiles(values: Percentiles | None, digits: int) -> str:
    if values is None:
        return "-"
    return " / ".join(f"{value:.{digits}f}" for value in (values.p50, values.p95, values.p99))
