"""The rivals by name. Each runs in a process of its own, so that its peak memory is its own."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from benchmarks.rivals.base import Rival

RIVALS = {
    "carrel full": "benchmarks.rivals.carrel_engine:full",
    "carrel pqcache": "benchmarks.rivals.carrel_engine:pqcache",
    "transformers generate": "benchmarks.rivals.transformers_model:generate",
    "transformers forward": "benchmarks.rivals.transformers_model:forward",
}


def rival(name: str) -> Callable[[str, int], Rival]:
    """The maker of a rival: model directory and longest context in, loaded rival out."""
    module, _, maker = RIVALS[name].partition(":")
    found: Callable[[str, int], Rival] = getattr(import_module(module), maker)
    return found
