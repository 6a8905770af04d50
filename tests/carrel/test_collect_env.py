"""What is told of a machine, and that nothing of it is secret."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from carrel.cli import main
from carrel.commands.collect_env import MASKED, PACKAGES, shown_variables
from carrel.process.version import version

SECRET = "do-not-tell-me"


def test_the_machine_and_the_installation_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["collect-env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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
    assert main(["collect-env", "--config", str(config)]) == 0
    out = capsys.readouterr().out
    assert SECRET not in out
    assert f"  api-key: {MASKED} (environment)" in out
    assert "  policy: quest (environment)" in out
    assert "  budget: 0.2 (file)" in out
    assert f"  HF_TOKEN: {MASKED}" in out
    assert f"  HF_ENDPOINT: https://{MASKED}@hub.example/x" in out
    assert "SOMETHING_ELSE" not in out
    # what cannot be used is told instead of ending the report
    monkeypatch.setenv("CARREL_BUDGET", "lots")
    assert main(["collect-env"]) == 0
    assert "cannot be used: CARREL_BUDGET 'lots' (environment): must be" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name", ["RAY_AUTH_TOKEN", "HF_HUB_KEY", "OTEL_EXPORTER_OTLP_HEADERS", "RAY_PASSWORD"]
)
def test_a_variable_whose_name_says_so_is_secret(name: str) -> None:
    assert shown_variables({name: SECRET}) == {name: MASKED}
