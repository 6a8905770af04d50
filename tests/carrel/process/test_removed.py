"""Removed options are refused with their new way, on each command line, in the environment and in a file."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import Command

from carrel.commands.deploy import DeployOptions
from carrel.process.options import OptionError, options_of, spellings, variable
from carrel.process.removed import MOVED, REMOVED, removed
from carrel.process.settings import ignored_variables, resolve
from carrel.serve.options import ServeOptions
from gateway.config import GatewayConfig, parse_config
from gpu_worker.config import WorkerConfig, parse_arguments
from gpu_worker.policies.hyper_parameters import hyper_parameters, read_options
from gpu_worker.policies.registry import METHODS, registry
from kv_store.config import StoreConfig
from kv_store.config import parse_config as parse_store

MOST_OPTIONS = 64
ALL = sorted({**REMOVED, **MOVED}.items())
PROCESSES = {GatewayConfig: parse_config, WorkerConfig: parse_arguments, StoreConfig: parse_store}
EACH = pytest.mark.parametrize(("name", "way"), ALL, ids=[name for name, _ in ALL])


@EACH
def test_a_removed_option_is_refused_with_the_new_way(
    name: str, way: str, tmp_path: Path, carrel: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag = f"--{name.replace('_', '-')}"
    said = f"is no longer an option: {way}"
    for words in ((flag, "3"), (f"{flag}=3",), (flag,)):
        error = carrel.refusal("serve", *words)
        assert f"{flag} (command line) {said}" in error
        assert error.count("\n") == 1
    file = tmp_path / "carrel.yaml"
    file.write_text(f"{flag[2:]}: 3\n")
    assert f"{flag[2:]} (file) {said}" in carrel.refusal("serve", "--config", file)
    monkeypatch.setenv(variable(name), "3")
    assert f"{variable(name)} (environment) {said}" in carrel.refusal("serve")
    assert ignored_variables(ServeOptions, {variable(name): "3"}) == []
    with pytest.raises(OptionError, match="is no longer an option"):
        resolve(DeployOptions, {"args": {flag[2:]: "3"}})


@EACH
def test_a_process_refuses_what_no_process_has(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable(name), "3")
    for kind, read in PROCESSES.items():
        assert (name in removed(kind)) == (name in REMOVED)
        if name in REMOVED:
            with pytest.raises(OptionError, match="is no longer an option"):
                read([])


def test_the_new_ways_are_there() -> None:
    policies = registry()
    methods = {each.name for each in METHODS}
    for name, way in ALL:
        assert name not in spellings(ServeOptions)
        for word in way.split():
            if word.startswith("--") and word != "--":
                assert word.rstrip(",;").removeprefix("--").replace("-", "_") in spellings(ServeOptions)
        if way.startswith("--policy-options") and "+outliers" not in way:
            ((policy, fields),) = read_options([way.split()[1]], methods).items()
            assert set(fields) <= set(hyper_parameters(policies[policy]))
    for name in MOVED:
        assert any(name in spellings(kind) for kind in PROCESSES)


def test_options_of_serve_stay_few() -> None:
    assert len(options_of(ServeOptions)) <= MOST_OPTIONS
