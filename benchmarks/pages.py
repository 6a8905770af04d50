"""`python -m benchmarks.pages [--check]`: the tables of README.md and docs/, written between their markers.

A table between `<!-- table NAME -->` and `<!-- end -->` comes from the options, the registry or a committed result.
Tables without markers belong to finished studies and do not change. With file names, prints those results as Markdown.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.commands import module_of
from benchmarks.figures import revive
from benchmarks.load.gateway_cost import GatewayCost, GatewayRow
from carrel.commands import plan
from carrel.commands.bench import BENCHMARKS
from carrel.commands.deploy import DeployOptions
from carrel.evaluation.fidelity import report as fidelity
from carrel.evaluation.record import read_report
from carrel.evaluation.table import markdown_table
from carrel.process.options import Option, options_of, variable
from carrel.process.version import CHECKOUT
from carrel.serve.options import ServeOptions
from carrel.tables import Column, interval, markdown, number, tokens
from gateway.config import GatewayConfig
from gpu_worker.config import WorkerConfig
from gpu_worker.policies.registry import registry
from gpu_worker.policies.table import methods
from gpu_worker.startup.sizing import size_cards
from kv_store.config import StoreConfig

BEGIN, END = re.compile(r"<!-- table (\S+) -->"), "<!-- end -->"
RESULTS, CONFIGS = CHECKOUT / "benchmarks" / "results", CHECKOUT / "benchmarks" / "configs"
PLANNED, PLANNED_TOKENS = ("llama-3.1-8b", "qwen3-14b", "llama-3.1-70b"), (8192, 32768, 131072)
Row = dict[str, Any]
# (context, batch) of the rows of decode results, by (rival, policy)
Cases = dict[tuple[int, int], dict[tuple[str, str], Row]]
DENSE, FULL, PQCACHE = ("minimal dense", "full"), ("carrel", "full"), ("carrel", "pqcache")


class PageError(ValueError):
    """A marker that cannot be filled."""


def methods_table() -> str:
    """Every method by itself, as `carrel methods` lists it."""
    rows = (
        (
            f"`{method.name}`",
            method.family,
            method.keeps,
            method.paper or "-",
            ", ".join(f"`{each}`" for each in method.parameters) or "-",
        )
        for method in methods(registry())
        if "+" not in method.name
    )
    return table(("policy", "family", "what it keeps", "paper", "parameters"), rows, texts=range(5))


def other_names() -> str:
    """Variants, wrapped policies and ablations, by the method whose name they begin with."""
    by_method: dict[str, list[str]] = {}
    for name in registry():
        method, _, rest = name.partition("+")
        if rest:
            by_method.setdefault(method, []).append(f"`+{rest}`")
    rows = ((f"`{method}`", ", ".join(names)) for method, names in by_method.items())
    return table(("method", "also"), rows, texts=range(2))


def option_table(
    kind: type, but: type | None = None, also: Sequence[str] = (), has_variables: bool = True
) -> str:
    """The options of a process in the groups of its help.

    but: options that it shares with this one are left out, except those in `also`.
    """
    shared = {each.field for each in options_of(but)} - set(also) if but else set()
    own: list[Option] = [each for each in options_of(kind) if each.field not in shared]
    rows: list[Sequence[str]] = []
    for group, members in groupby(own, lambda each: each.group):
        rows.append((f"**{group}**", "", "", ""))
        for each in members:
            names = [each.metavar] if each.is_positional else each.flags
            default = each.shown and f"`{each.shown}`"
            name = f"`{variable(each.name)}`" if has_variables else "-"
            rows.append((", ".join(f"`{one}`" for one in names), each.help, default, name))
    shown = table(("option", "meaning", "default", "variable"), rows, texts=range(4))
    return shown.replace("** |  |  |  |", "** | | | |")


def sizings() -> str:
    """The GPUs on which models of three sizes start, as `carrel plan` shows it."""
    rows: list[Sequence[str]] = []
    for file in PLANNED:
        config = WorkerConfig(model=str(CONFIGS / f"{file}.json"), listen="unix:-", store="unix:-")
        sizing = size_cards(config, plan.CARDS, None)
        for card in sizing.cards:
            held = {each.num_tokens: plan.counts(each) for each in card.held}
            counted = (held.get(length, "-") for length in PLANNED_TOKENS)
            served = (f"{card.kv_tokens:,}", plan.longest(card), *counted)
            if card.held:
                rows.append((file, plan.size(card), f"{sizing.weight_bytes / 2**30:.1f}", *served))
    headings = ("model", "GPU, GiB", "weights, GiB", "KV tokens", "longest context")
    return table((*headings, *map(tokens, PLANNED_TOKENS)), rows)


def decode_steps() -> str:
    """Milliseconds of a decode step with every token on the GPU."""
    headings = ("context x batch", "minimal dense, ms", "weights only, ms", "`full`, ms", "x dense")
    rows = (
        (
            f"{tokens(context)} x {batch}",
            spread(of[DENSE]["figures"]["step_ms"], 2),
            spread(of["weights only", "full"]["figures"]["step_ms"], 2),
            *(
                text
                for case in (FULL, PQCACHE)
                for text in (spread(of[case]["figures"]["step_ms"], 2), ratio(of[case]))
            ),
        )
        for (context, batch), of in cases("decode_h200").items()
    )
    return table((*headings, "`pqcache`, ms", "x dense"), rows)


def rival_steps() -> str:
    """README's table: decode steps on the GPU that most have, beside the fastest rival measured on it."""
    measured = results("vllm_decode_fp8_h100", "workloads")
    vllm = {(row["context"], row["batch"]): row["decode_ms"] for row in measured}
    packed = {
        (row["case"]["context"], row["case"]["batch"]): row
        for row in results("decode_packed_h100")
        if row["case"]["quantization"] == "fp8"
    }
    rows = (
        (
            f"{tokens(context)} x {batch}",
            f"{rival:.2f}",
            *(f"{(ms := of[case]['figures']['step_ms']['median']):.2f} ({rival / ms:.2f} x)" for case in of),
            # of another card: no ratio
            f"{packed[context, batch]['figures']['step_ms']['median']:.2f}",
        )
        for (context, batch), of in cases("decode_h100").items()
        for rival in (vllm[context, batch],)
    )
    carrel = ("Carrel bf16, `full`", "`pqcache`", "`bitkeys`, the default", "`bitkeys`, fp8 weights")
    return table(("context x requests", "vLLM 0.24, fp8", *carrel), rows)


def kernels() -> str:
    """Every kernel at its largest size."""
    largest = {
        row["op"]: row for row in sorted(results("kernels_h200"), key=lambda row: int(row["num_bytes"]))
    }
    rows = (
        (
            f"`{op}`",
            row["label"],
            f"{row['us']['median']:,.1f}",
            f"{row['tb_per_s']:.2f}",
            f"{row['ceiling_share']:.2f}",
            row["rival"] or "-",
            number(row["rival_ratio"], 1),
        )
        for op, row in sorted(largest.items())
    )
    headings = ("kernel", "size", "us", "TB/s", "x a copy's rate", "rival", "x its speed")
    return table(headings, rows, texts=(0, 1, 5))


def gateway() -> str:
    """Processor time of each part of a request."""
    cost = GatewayCost.of(*(revive(GatewayRow, row) for row in results("gateway_cpu")))
    rows = (
        ("a request by itself", f"{cost.request_us / 1000:.1f} ms"),
        ("a token of its prompt", f"{cost.prompt_token_us:.1f} us"),
        ("a token of its answer, streamed", f"{cost.output_token_us:.0f} us"),
    )
    return table(("part", "processor time"), rows)


def results(name: str, key: str = "rows") -> list[Row]:
    """The rows of benchmarks/results/NAME.json."""
    rows: list[Row] = json.loads((RESULTS / f"{name}.json").read_text())[key]
    return rows


def cases(name: str) -> Cases:
    """Decode rows by workload, then by rival and policy."""
    found: Cases = {}
    for row in results(name):
        case = row["case"]
        found.setdefault((case["context"], case["batch"]), {})[row["rival"], case["policy"]] = row
    return found


def spread(times: Row, digits: int) -> str:
    return interval(times["median"], times["low"], times["high"], digits)


def ratio(row: Row) -> str:
    return number(row["throughput_ratio"], 2)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], texts: Iterable[int] = (0,)) -> str:
    """A Markdown table. texts: the columns that are not aligned as numbers."""
    texts = set(texts)
    columns = [
        Column[Sequence[str]](heading, lambda row, index=index: row[index], index not in texts)
        for index, heading in enumerate(headings)
    ]
    return markdown(columns, list(rows))


TABLES: dict[str, Callable[[], str]] = {
    "methods": methods_table,
    "other-names": other_names,
    "serve-options": lambda: option_table(ServeOptions),
    "deploy-options": lambda: option_table(
        DeployOptions, but=ServeOptions, also=("host", "port", "model"), has_variables=False
    ),
    "gateway-options": lambda: option_table(GatewayConfig, but=ServeOptions, also=("model",)),
    "worker-options": lambda: option_table(WorkerConfig, but=ServeOptions, also=("model",)),
    "store-options": lambda: option_table(StoreConfig, but=ServeOptions, also=("model",)),
    "rival-steps": rival_steps,
    "sizings": sizings,
    "decode": decode_steps,
    "kernels": kernels,
    "gateway": gateway,
}


def fill(text: str, tables: Mapping[str, Callable[[], str]] = TABLES) -> str:
    """`text` with every generated table replaced.

    Raises PageError for a name that `tables` does not have, and for a marker that is not closed.
    """
    parts, rest = [], text
    while found := BEGIN.search(rest):
        name = found[1]
        if name not in tables:
            raise PageError(f"no table {name!r}; there are {', '.join(sorted(tables))}")
        end = rest.find(END, found.end())
        following = BEGIN.search(rest, found.end())
        if end < 0 or (following and following.start() < end):
            raise PageError(f"table {name!r} is not closed by {END}")
        parts.append(f"{rest[: found.end()]}\n\n{tables[name]()}\n\n{END}")
        rest = rest[end + len(END) :]
    return "".join([*parts, rest])


def pages(root: Path = CHECKOUT) -> list[Path]:
    """README.md and every page of docs/."""
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]


def render(path: Path) -> str:
    """A result file as Markdown: its command and commit, and its table."""
    content = json.loads(path.read_text())
    about = content.get("about", {})
    told = f"`{about.get('command')}`, {about.get('date')}, {about.get('versions')}"
    if "fidelity" in content:
        shown = markdown(fidelity.COLUMNS, fidelity.read_fidelity(path).rows())
    elif "cells" in content:
        shown = markdown_table(read_report(path).results())
    elif content.get("benchmark") in BENCHMARKS:
        shown = import_module(module_of(content["benchmark"])).render(content)
    else:
        raise PageError(f"{path} is not a result of `carrel bench` or `carrel eval`")
    return f"### {path.stem}\n\n{told}\n\n{shown}\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Return 1 when `--check` finds a page that differs, 2 for a page or file that cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pages", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a page would change")
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="results to print instead")
    options = parser.parse_args(argv)
    try:
        for file in options.files:
            print(render(file))
        written = {} if options.files else {page: fill(page.read_text()) for page in pages()}
    except PageError as error:
        print(error, file=sys.stderr)
        return 2
    drifted = [page for page, text in written.items() if text != page.read_text()]
    for page in [] if options.check else drifted:
        page.write_text(written[page])
    if drifted:
        what = "differ from their sources; run `make docs`" if options.check else "written"
        print(f"{', '.join(page.name for page in drifted)}: {what}")
    return int(options.check and bool(drifted))


if __name__ == "__main__":
    sys.exit(main())
