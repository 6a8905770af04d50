"""Test how installed packages are compared with what Carrel declares."""

from __future__ import annotations

import pytest

from carrel.doctor.finding import State
from carrel.doctor.packages import PROCESSES, Process, check_process, is_within, requirements
from carrel.machine import version_of

DECLARED = [
    "grpcio<2,>=1.75.1",
    'torch<3,>=2.11; extra == "gpu-worker"',
    'ray[default]<3,>=2.60; extra == "kv-store"',
    'carrel[kv-store-process,gpu-worker]; extra == "kv-store"',
    'faiss-cpu<2,>=1.9; extra == "kv-store-process"',
    'triton<3.8,>=3.6; platform_system == "Linux" and extra == "bench"',
]


@pytest.mark.parametrize(
    ("version", "bounds", "expected"),
    [
        ("1.15.1", "<2,>=1.9", True),
        ("2.0", "<2,>=1.9", False),
        ("1.8.9", "<2,>=1.9", False),
        ("0.165.0", "<0.166,>=0.165", True),
        ("2.13.0+cpu", "<3,>=2.11", True),
        ("3", ">=3.0", True),
        ("1.75.2", "==1.75.1", False),
        ("5", "", True),
        ("", "", False),
    ],
)
def test_a_version_is_within_its_bounds(version: str, bounds: str, expected: bool) -> None:
    assert is_within(version, bounds) is expected


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ("gpu-worker", {"torch": "<3,>=2.11"}),
        ("kv-store", {"ray": "<3,>=2.60", "faiss-cpu": "<2,>=1.9", "torch": "<3,>=2.11"}),
        ("bench", {"triton": "<3.8,>=3.6"}),
        ("none", {}),
    ],
)
def test_an_extra_needs_what_the_extras_within_it_need(extra: str, expected: dict[str, str]) -> None:
    assert dict(requirements(extra, DECLARED)) == expected


@pytest.mark.parametrize(
    ("requirement", "imports", "text"),
    [
        ('no-such-package>=1; extra == "x"', (), "no-such-package is missing (>=1 is needed)"),
        ('pytest>=1000; extra == "x"', (), f"pytest {version_of('pytest')} (>=1000 is needed)"),
        ('pytest>=1; extra == "x"', ("no_such_module",), "import no_such_module: ModuleNotFoundError"),
    ],
)
def test_what_a_process_lacks_is_a_problem(requirement: str, imports: tuple[str, ...], text: str) -> None:
    found = check_process(Process("it", "x", imports), [requirement])
    assert found.state is State.PROBLEM
    assert found.text.startswith(text)
    assert found.remedy == "pip install -U 'carrel[x]'"


def test_what_is_installed_is_shown_with_its_version() -> None:
    found = check_process(Process("it", "x", ("pytest",)), ['pytest>=1; extra == "x"'])
    assert (found.state, found.text) == (State.OK, f"pytest {version_of('pytest')}")


def test_every_process_has_an_extra_of_the_project() -> None:
    from tomllib import loads

    from carrel.process.version import CHECKOUT

    extras = loads((CHECKOUT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {process.extra for process in PROCESSES} <= extras.keys()
