"""Errors that must not end what meets them: a loop in the background, say, of which nobody else would know."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


class NotedErrors:
    """Logs the first of each kind with its traceback; others of that kind are told at level debug."""

    def __init__(self, logger: logging.Logger, what: str) -> None:
        """what: fails, and goes on."""
        self._logger = logger
        self._what = what
        self._kinds: set[type[Exception]] = set()

    def note(self, error: Exception) -> None:
        level = logging.DEBUG if type(error) in self._kinds else logging.ERROR
        self._kinds.add(type(error))
        self._logger.log(
            level, "%s failed, and goes on; errors of this kind are told once", self._what, exc_info=error
        )

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Record an exception of the block, and go on after it."""
        try:
            yield
        except Exception as error:
            self.note(error)
