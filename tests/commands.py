"""Commands as their users see them, run in the test's process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest


@dataclass(frozen=True)
class Ended:
    """A command that has ended: its exit code, and what it printed."""

    code: object
    out: str
    err: str


@dataclass(frozen=True)
class Command:
    """main: gets the words of a command line, each as a string."""

    main: Callable[[list[str]], object]
    captured: pytest.CaptureFixture[str]

    def __call__(self, *words: Any) -> Ended:
        try:
            code = self.main([str(word) for word in words])
        except SystemExit as ended:
            code = ended.code
        return Ended(code, *self.captured.readouterr())

    def output(self, *words: Any) -> str:
        """Run a command that must end well, and return what it says on stdout."""
        ended = self(*words)
        assert ended.code == 0, ended
        return ended.out

    def refusal(self, *words: Any, code: int = 2) -> str:
        """Run a command that must end with `code`, and return what it says on stderr."""
        ended = self(*words)
        assert ended.code == code, ended
        return ended.err
