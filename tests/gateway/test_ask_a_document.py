"""The example `examples/ask_a_document.py` against a gateway: its answer, and how far the prompt is meanwhile."""

from __future__ import annotations

import runpy
import sys
from io import StringIO
from pathlib import Path

import pytest
from gateway_stack import Stack

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "ask_a_document.py"
OPTIONS = ("--max-tokens", "4", "--policy", "pqcache")


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_shown_until_the_answer_begins(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stack.say("the fox").progress = [(0, 4), (2, 4)]
    book = tmp_path / "book.txt"
    book.write_text("the quick fox")
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), str(book), "Which?", "--url", stack.url, *OPTIONS])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert ": 4 of " in terminal.getvalue()
    assert "prompt tokens done, 4 of them reused" in terminal.getvalue()
    assert "pqcache: the fox\n" in capsys.readouterr().out
