"""Test the report of a machine, and that it holds no secret."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import Command

from carrel.commands.collect_env import MASKED, PACKAGES, shown_variables
from carrel.process.version import version

SECRET = "do-not-tell-me"


def test_the_machine_and_the_installation_are_told(carrel: Command) -> None:
    found = json.loads(carrel.output("collect-env", "--json"))
    assert found["carrel"]["version"] == version()
    assert found["packages"].keys() == set(PACKAGES)
    assert found["packages"]["grpcio"].startswith("1.")
    for heading, names in (
        ("platform", {"python", "processor", "cores"}),
        ("memory", {"MemTotal", "MemAvailable", "/dev/shm"}),
        ("limits", {"locked memory", "descriptors"}),
    ):
        assert names <= found[heading].keys()
        assert all(found[heading][name] for name in names)
    assert found["gpus"]


def test_options_are_told_and_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, carrel: Command
) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text("budget: 0.2\n")
    for name, text in (
        ("CARREL_API_KEY", SECRET),
        ("CARREL_POLICY", "quest"),
        ("CARREL_STORE_TOKEN", SECRET),
        ("HF_TOKEN", SECRET),
        ("HF_ENDPOINT", f"https://me:{SECRET}@hub.example/x"),
        ("OTEL_EXPORTER_OTLP_HEADERS", f"x-api={SECRET}"),
        ("SOMETHING_ELSE", SECRET),
    ):
        monkeypatch.setenv(name, text)
    out = carrel.output("collect-env", "--config", config)
    assert SECRET not in out
    assert f"  api-key: {MASKED} (environment)" in out
    assert "  policy: quest (environment)" in out
    assert "  budget: 0.2 (file)" in out
    assert f"  HF_TOKEN: {MASKED}" in out
    assert f"  HF_ENDPOINT: https://{MASKED}@hub.example/x" in out
    assert "SOMETHING_ELSE" not in out
    # what cannot be used is told instead of ending the report
    monkeypatch.setenv("CARREL_BUDGET", "lots")
    told = "cannot be used: CARREL_BUDGET 'lots' (environment): must be"
    assert told in carrel.output("collect-env")


@pytest.mark.parametrize(
    "name", ["RAY_AUTH_TOKEN", "HF_HUB_KEY", "OTEL_EXPORTER_OTLP_HEADERS", "RAY_PASSWORD"]
)
def test_a_variable_whose_name_says_so_is_secret(name: str) -> None:
    assert shown_variables({name: SECRET}) == {name: MASKED}
