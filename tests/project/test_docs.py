"""The pages name what the code takes."""

from __future__ import annotations

import re
from pathlib import Path
from unittest.mock import Mock

import pytest
from checkout import ROOT
from fastapi.routing import APIRoute, iter_route_contexts

from carrel.commands import COMMANDS, calibrate, chat, deploy, doctor, methods, serve
from carrel.commands import eval as eval_command
from carrel.process.command_line import Parser
from carrel.process.request_limits import MAX_UINT32, RANGES
from gateway.config import GatewayConfig
from gateway.metrics import Metrics
from gateway.rest.answer import CARREL_FIELDS, TIMING_FIELDS
from gateway.rest.app import create_app
from gateway.rest.errors import TYPES
from gateway.rest.schemas import (
    CarrelBody,
    StreamOptions,
)
from gateway.rest.session_endpoints import SessionChangedAnswer
from gpu_worker.policies.registry import registry
from gpu_worker.v1.gpu_worker_pb2 import StatsResponse, StoreStatsResponse

ROW = re.compile(r"^\| (\d+) \| (.+?) \| (.*?) \| (.*?) ?\|$", re.MULTILINE)
NAME = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def options_of(add_arguments: object) -> list[str]:
    parser = Parser(add_help=False)
    assert callable(add_arguments)
    add_arguments(parser)
    return re.findall(r"^  (--[a-z-]+)", parser.format_help(), re.MULTILINE)


@pytest.mark.parametrize(
    "command", [serve, deploy, chat, calibrate, methods, doctor], ids=lambda command: command.__name__
)
def test_the_cli_page_names_every_option(command: object) -> None:
    page = (ROOT / "docs/cli.md").read_text()
    missing = [flag for flag in options_of(vars(command)["add_arguments"]) if f"`{flag}`" not in page]
    assert missing == []


def test_the_evaluation_page_names_every_option() -> None:
    page = (ROOT / "docs/evaluation.md").read_text()
    assert [flag for flag in options_of(eval_command.add_arguments) if flag not in page] == []


def test_the_cli_page_names_every_command() -> None:
    page = (ROOT / "docs/cli.md").read_text()
    assert [name for name in COMMANDS if f"`carrel {name}" not in page] == []


def test_the_api_page_names_every_route_field_and_error() -> None:
    page = (ROOT / "docs/api.md").read_text()
    app = create_app(GatewayConfig(model="m", worker="unix:w"), Mock())
    routes = list(app.openapi()["paths"])
    contexts = [each for each in iter_route_contexts(app.routes) if isinstance(each.original_route, APIRoute)]
    asked = [each.body_field.field_info.annotation for each in contexts if each.body_field is not None]
    bodies = (*asked, CarrelBody, StreamOptions, SessionChangedAnswer)
    fields = [*CARREL_FIELDS, *TIMING_FIELDS, *(name for body in bodies for name in body.model_fields)]
    rows = [f"| {status} | `{kind}` |" for status, kind in TYPES.items()]
    wanted = [*(re.sub("{.*}", "ID", path) for path in routes), *fields, *rows]
    # `user` is taken and ignored
    assert [name for name in wanted if name not in page and name != "user"] == []


def test_the_deployment_page_names_every_metric() -> None:
    text = Metrics("tiny").render(StatsResponse(), StoreStatsResponse()).decode()
    page = (ROOT / "docs/deployment.md").read_text()
    kinds = dict(re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE))
    told = {
        name: kind
        for names, kind in re.findall(r"^\| (`carrel_[^|]+) \| (\w+) \|", page, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", names)
    }
    assert told == {name: kind for name, kind in kinds.items() if not name.endswith("_created")}


def test_the_methods_page_has_the_cost_of_every_method() -> None:
    page = (ROOT / "docs/methods.md").read_text()
    costs = page[page.index("## What they cost") :]
    assert [name for name in registry() if "+" not in name and f"| `{name}` |" not in costs] == []


def test_the_api_page_has_every_range() -> None:
    page = (ROOT / "docs/api.md").read_text()
    # of whole numbers only the type's own limits
    told = {
        name: range
        for name, range in RANGES.items()
        if range.le != MAX_UINT32 and name not in ("seed", "budget_share")
    }
    assert [
        name
        for name, range in told.items()
        if not re.search(rf"\| `{name}`[^|]*\| {re.escape(str(range))} \|", page)
    ] == []


PAGES = (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")))


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of `page`: its headings, and the ids of `<a id="...">` for links from elsewhere."""
    text = page.read_text()
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    ids = re.findall(r'^<a id="([\w-]+)"></a>$', text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings} | set(ids)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        target, _, anchor = link.partition("#")
        if "://" in target:
            continue
        file = page.parent / target if target else page
        if not file.exists() or (anchor and anchor not in anchors_of(file)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_are_there(page: Path) -> None:
    roots = (
        "benchmarks|carrel|deploy|docker|docs|examples|gateway|gpu_worker|kv_store|models|proto|tests|tools"
    )
    named = re.findall(rf"`((?:{roots})/[\w./]+)`", page.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_each_attack_names_tests_that_are_there_or_says_what_is_missing() -> None:
    rows = ROW.findall((ROOT / "docs" / "reliability.md").read_text(encoding="utf-8"))
    assert [int(number) for number, *_ in rows] == list(range(1, len(rows) + 1))
    assert len(rows) > 40
    for number, _, tests, missing in rows:
        named = NAME.findall(tests)
        assert named or missing, number
        assert re.sub(r"[`, ]", "", NAME.sub("", tests)) == "", number
        for file, test in named:
            text = (ROOT / file).read_text(encoding="utf-8")
            assert re.search(rf"def {test}\(", text), f"{number}: {file}::{test}"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110


def test_the_architecture_page_names_the_methods_that_compute_a_known_prompt_anew() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    sentence = re.search(
        r"policy reads \(`Policy\.num_queries`\):(.*?)read queries of the whole prompt", page, re.DOTALL
    )
    assert sentence
    named = set(re.findall(r"`(\w+)`", sentence[1])) - {"snapkv", "nacl"}
    length = 32_000
    plans = {name: (policy, policy.plan(length, 2_000)) for name, policy in registry().items()}
    # Rows of a sparse prefill are shared by nobody anyway; variants read what their method does.
    read_all = {name for name, (policy, plan) in plans.items() if policy.num_queries(plan) == length}
    assert named == {re.split(r"\+|_c$", name)[0] for name in read_all}
