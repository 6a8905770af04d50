"""`carrel methods`: the policies of the worker's registry, each with its paper."""

from __future__ import annotations

import json

import pytest
from commands import Command

from carrel.commands import methods
from carrel.methods import PolicySummary, ablations_of, read_methods
from gpu_worker.policies.registry import METHODS, registry

# one process runs the file and reads the policies once
pytestmark = pytest.mark.xdist_group("methods")


@pytest.fixture(scope="module")
def known() -> list[PolicySummary]:
    """Read once: the process that tells them imports PyTorch."""
    return read_methods()


@pytest.fixture
def read_before(known: list[PolicySummary], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "read_methods", lambda: known)


@pytest.mark.usefixtures("read_before")
def test_all_policies_are_told_with_what_they_are_of(carrel: Command) -> None:
    told = [json.loads(line) for line in carrel.output("methods", "--all", "--json").splitlines()]
    assert [each["name"] for each in told] == list(registry())
    assert [each["name"] for each in told if not each["keeps"]] == []
    assert [each["name"] for each in told if not each["paper"]] == ["full"]
    quest = next(each for each in told if each["name"] == "quest")
    assert (quest["family"], quest["parameters"]) == ("recall", ["page_size=16 (1 to 4096)"])


@pytest.mark.usefixtures("read_before")
def test_each_method_has_one_line_of_80_columns(
    known: list[PolicySummary], carrel: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = carrel.output("methods").splitlines()
    assert max(map(len, lines)) <= 80
    plain = [each for each in known if "+" not in each.name]
    for line, each in zip(lines[1:], plain, strict=False):
        assert [each.name, each.family, *each.keeps.split()] == line.split()


@pytest.mark.usefixtures("read_before")
@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("pqcache", ["Zhang et al., PQCache", "pqcache+ip", "--policy-options pqcache:FIELD=VALUE"]),
        ("pqcache", ["recent_ratio 0.5 0 to 1, per request", "names_metric False not an option"]),
        ("snapkv+adakv", ["Feng et al., Ada-KV", "alpha 0.2 0 to 1"]),
        ("full", ["All tokens, in slots"]),
    ],
)
def test_one_method_is_shown_with_its_options(name: str, texts: list[str], carrel: Command) -> None:
    out = " ".join(carrel.output("methods", name).split())
    assert [text for text in texts if text not in out] == []


@pytest.mark.usefixtures("read_before")
def test_an_unknown_name_gets_the_nearest_and_the_plain_ones(carrel: Command) -> None:
    error = carrel.refusal("methods", "snapkw")
    assert "unknown policy 'snapkw'; choose one of full, oracle, " in error
    assert error.rstrip().endswith("; did you mean snapkv?")
    assert "+" not in error


def test_ablations_are_those_that_a_method_names(known: list[PolicySummary]) -> None:
    named = {one.name: [f"{one.name}+{end}" for end in one.ablations] for one in METHODS if one.ablations}
    assert ablations_of(known) == named


def test_without_a_worker_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch, carrel: Command) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    assert "Install carrel[gpu-worker]" in carrel.refusal("methods", code=1)
