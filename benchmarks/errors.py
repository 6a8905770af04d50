"""Errors of a benchmark, shown in one line."""

from __future__ import annotations


class BenchmarkError(Exception):
    """The run cannot go on; never shown with a traceback. Ends a process with `exit_code`."""

    exit_code = 1


class NotMeasurable(Exception):
    """A rival cannot run this case here; its row says why, and the run goes on."""
