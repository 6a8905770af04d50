"""What the user sees: bars and a status line on a terminal, plain lines elsewhere."""

from __future__ import annotations

from rich.console import Console

from carrel.serve.display.base import Display
from carrel.serve.display.plain import PlainDisplay
from carrel.serve.display.terminal import TerminalDisplay

__all__ = ["Display", "PlainDisplay", "TerminalDisplay", "create_display"]


def create_display(console: Console, is_verbose: bool, errors: Console | None = None) -> Display:
    """The display that fits where `console` writes to."""
    variant = TerminalDisplay if console.is_terminal else PlainDisplay
    return variant(console, is_verbose, errors)
