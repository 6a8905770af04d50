"""The policies of the worker's package, read from a process of it: this one may not import it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from carrel.errors import CarrelError
from carrel.serve.children import child_environment


class MethodsError(CarrelError):
    """The policies cannot be read."""


@dataclass(frozen=True)
class PolicySummary:
    """One policy. parameters: such as "num_sink=4". ablation_of: the method that it is an ablation of, or empty."""

    name: str
    family: str
    paper: str
    keeps: str
    parameters: tuple[str, ...]
    ablation_of: str


def read_methods() -> list[PolicySummary]:
    """By name, a method before its ablations. Raises MethodsError where `gpu_worker` cannot be started."""
    command = [sys.executable, "-P", "-m", "gpu_worker.policies"]
    environment = child_environment(os.environ)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise MethodsError(f"the worker's policies cannot be read: {last}. Install carrel[gpu-worker].")
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return [PolicySummary(**{**fields, "parameters": tuple(fields["parameters"])}) for fields in found]


def ablations_of(methods: Sequence[PolicySummary]) -> dict[str, list[str]]:
    """The names of each method's ablations, of those that have any."""
    found: dict[str, list[str]] = {}
    for method in methods:
        if method.ablation_of:
            found.setdefault(method.ablation_of, []).append(method.name)
    return found
