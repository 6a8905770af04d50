"""The profile `monitoring`: Grafana finds its board, Prometheus its alerts, and queries ask for what is exported."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from checkout import ROOT
from prometheus_client.parser import text_string_to_metric_families

from gateway.metrics import Metrics
from gpu_worker.v1.gpu_worker_pb2 import Histogram, StatsResponse, StoreCalls, StoreStatsResponse

FOLDER = ROOT / "deploy/monitoring"
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
BOARD = json.loads((FOLDER / "boards/carrel.json").read_text())
PANELS: list[dict[str, Any]] = BOARD["panels"]
ALERTS: list[dict[str, Any]] = [
    rule for group in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"] for rule in group["rules"]
]
FUNCTIONS = {"deriv", "histogram_quantile", "min_over_time", "rate"}
WORDS = {"and", "by", "on", "sum", "unless"}
EACH_ALERT = pytest.mark.parametrize("rule", ALERTS, ids=[rule["alert"] for rule in ALERTS])


def mounts(service: str) -> dict[str, Path]:
    """Where in the container, and what of the checkout."""
    pairs = (volume.split(":") for volume in SERVICES[service]["volumes"] if volume.startswith("./"))
    return {inside: ROOT / outside for outside, inside, *_ in pairs}


def exported() -> dict[str, set[str]]:
    """The labels of every sample by its name, of a gateway whose worker and store answer."""
    metrics = Metrics("tiny")
    metrics.count_request("chat", "stop", "key")
    calls = [StoreCalls(method="Begin", counts=[1, 0], codes={"OK": 1})]
    times = Histogram(bounds=[1.0], counts=[1, 0], sum=0.5)
    worker = StatsResponse(decode_stall_seconds={"rows": times}, fallbacks_total={"recompute": 1})
    store = StoreStatsResponse(call_bounds=[1.0], calls=calls)
    for stats in (worker, store):
        for field in stats.DESCRIPTOR.fields:
            if field.message_type is Histogram.DESCRIPTOR:
                getattr(stats, field.name).CopyFrom(times)
    text = metrics.render(worker, store).decode()
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


EXPORTED = exported()
# by Prometheus itself
KNOWN = {**EXPORTED, "up": {"job", "instance"}}
QUERIES = [
    *(target["expr"] for panel in PANELS for target in panel.get("targets", [])),
    *(variable["query"]["query"] for variable in BOARD["templating"]["list"]),
]


def test_every_query_asks_for_metrics_that_are_exported_by_labels_that_they_have() -> None:
    assert len(QUERIES) > 40
    for query in QUERIES:
        names = re.findall(r"\bcarrel_\w+", query)
        assert names
        assert [name for name in names if name not in EXPORTED] == [], query
        labels = set.intersection(*(EXPORTED[name] for name in names))
        asked = {label for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(", ")}
        asked |= set(re.findall(r"[{,](\w+)(?:=|!=)", query))
        assert asked <= labels, query


def test_a_legend_names_labels_that_the_query_leaves() -> None:
    for panel in PANELS:
        for target in panel.get("targets", []):
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            if "by (" in target["expr"]:
                assert shown <= set(re.split(r"[ ,()]+", target["expr"])), target


def test_panels_do_not_overlap_and_have_numbers_of_their_own() -> None:
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    taken = [
        (x, y)
        for panel in PANELS
        for place in [panel["gridPos"]]
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(taken) == len(set(taken))
    assert max(x for x, _ in taken) < 24


def test_grafana_finds_its_board_and_its_source() -> None:
    inside = mounts("grafana")
    assert all(path.exists() for path in inside.values())
    provisioning = inside["/etc/grafana/provisioning"]
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yaml").read_text())["datasources"]
    (provider,) = yaml.safe_load((provisioning / "dashboards/carrel.yaml").read_text())["providers"]
    assert (inside[provider["options"]["path"]] / "carrel.json").is_file()
    assert source["url"] == "http://prometheus:9090"
    sources = [
        each["datasource"]
        for panel in PANELS
        for each in [panel, *panel.get("targets", [])]
        if "datasource" in each
    ]
    assert {each["uid"] for each in sources} == {source["uid"]}
    home = Path(SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (inside[str(home.parent)] / home.name).is_file()


@pytest.mark.parametrize("gateway", ["gateway-cpu", "gateway-gpu"])
def test_prometheus_asks_the_gateway_by_a_name_that_it_answers_to(gateway: str) -> None:
    config = yaml.safe_load(mounts("prometheus")["/etc/prometheus/prometheus.yml"].read_text())
    (job,) = config["scrape_configs"]
    ((target,),) = (each["targets"] for each in job["static_configs"])
    name, port = target.split(":")
    service = SERVICES[gateway]
    assert name in service["networks"]["default"]["aliases"]
    assert port == service["command"][service["command"].index("--port") + 1]
    assert f":-{name}}}" in service["environment"]["CARREL_ALLOWED_HOSTS"]
    # the key lies where the service's command puts it
    assert f"> {job['authorization']['credentials_file']} " in " ".join(SERVICES["prometheus"]["command"])


@pytest.mark.parametrize("service", ["prometheus", "grafana"])
def test_an_image_has_a_version(service: str) -> None:
    assert re.fullmatch(r"\$\{CARREL_\w+_IMAGE:-[\w/]+:v?\d+\.\d+\.\d+\}", SERVICES[service]["image"])


def tokens_of(expression: str) -> list[str]:
    """Split PromQL into strings, words, numbers, ranges and operators. Raises AssertionError for any other text."""
    token = r'"[^"]*"|\[\d+[smhd]\]|[A-Za-z_]\w*|\d+(?:\.\d+)?|[=!]~|[=!<>]=|[-+*/<>(){},=]'
    assert not re.sub(rf"{token}|\s", "", expression), expression
    return re.findall(token, expression)


def is_balanced(tokens: list[str]) -> bool:
    closing, opened = {")": "(", "}": "{"}, []
    for token in tokens:
        if token in closing.values():
            opened.append(token)
        elif token in closing and (not opened or opened.pop() != closing[token]):
            return False
    return not opened


@EACH_ALERT
def test_an_alert_asks_for_metrics_that_are_exported_by_labels_that_they_have(rule: dict[str, Any]) -> None:
    tokens = tokens_of(rule["expr"])
    assert is_balanced(tokens)
    words = {token for token in tokens if re.match(r"[a-z]", token)}
    names = {word for word in words if word.startswith("carrel_") or word in KNOWN}
    assert names <= KNOWN.keys()
    labels = set.intersection(*(KNOWN[name] for name in names))
    called = {word for word, after in pairwise(tokens) if after == "("} & words - WORDS
    assert called <= FUNCTIONS
    # Prometheus adds the instance to each series
    assert words - names - called - WORDS <= labels | {"instance"}
    assert set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])) <= labels | {"instance"}


@EACH_ALERT
def test_an_alert_says_how_long_how_bad_and_where_help_is(rule: dict[str, Any]) -> None:
    assert re.fullmatch(r"\d+m", rule["for"])
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert rule["annotations"]["summary"].endswith(".")
    page, _, anchor = rule["annotations"]["runbook"].partition("#")
    headings = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(), re.MULTILINE)
    assert anchor in {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_prometheus_finds_its_alerts_and_they_its_job() -> None:
    inside = mounts("prometheus")
    config = yaml.safe_load(inside["/etc/prometheus/prometheus.yml"].read_text())
    assert [inside[f"/etc/prometheus/{name}"] for name in config["rule_files"]] == [FOLDER / "alerts.yml"]
    jobs = {job for rule in ALERTS for job in re.findall(r'job="(\w+)"', rule["expr"])}
    assert jobs == {job["job_name"] for job in config["scrape_configs"]}


@pytest.mark.parametrize("expression", ["rate(a[5m]", "sum(a}", "a) > (0", "a{b='c'}", 'a{b="c} > 0', "a[5]"])
def test_wrong_promql_is_found(expression: str) -> None:
    with pytest.raises(AssertionError):
        assert is_balanced(tokens_of(expression))
