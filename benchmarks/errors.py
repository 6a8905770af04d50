"""Errors of a benchmark, shown in one line."""

from __future__ import annotations


class BenchmarkError(Exception):
    """The run cannot go on; never shown with a traceback."""


class NotMeasurable(Exception):
    """A rival cannot run this case here; its row says why, and the run goes on."""
