"""`carrel chat`: a conversation in the terminal, or one question and its answer."""

from __future__ import annotations

import argparse
import importlib
import math
import os
import signal
import sys
from contextlib import closing
from pathlib import Path

from rich.console import Console

from carrel.chat.client import ChatClient
from carrel.chat.conversation import ChatOptions, Conversation, not_text
from carrel.chat.repl import Repl
from carrel.process.command_line import budget, flag
from carrel.process.options import OptionError
from carrel.texts import read_text

STOPPED_EXIT_CODE = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flag(parser, "--url", "server", "http://127.0.0.1:8000", metavar=None)
    flag(parser, "--api-key", "default: CARREL_API_KEY", metavar="KEY")
    flag(parser, "--file", "text file to talk about", parse=Path, metavar=None)
    flag(parser, "--question", "ask this, print the answer, and end", metavar=None)
    flag(parser, "--policy", "selection policy (default: the server's)", metavar="NAME")
    flag(
        parser,
        "--budget",
        "tokens attended: a share of the prompt or a number",
        parse=budget,
        metavar="SHARE|N",
    )
    flag(parser, "--system", "system message", metavar="TEXT")
    flag(parser, "--max-tokens", "longest answer, in tokens", parse=int)
    flag(parser, "--temperature", "0 is greedy", parse=_number, metavar="T")


def run(arguments: argparse.Namespace) -> int:
    """Answers go to stdout, all else to stderr. Raises CarrelError."""
    options = ChatOptions(arguments.max_tokens, arguments.temperature, arguments.policy, arguments.budget)
    document = read_text(arguments.file) if arguments.file else None
    question = arguments.question
    if question is None and not sys.stdin.isatty():
        question = _read_stdin()
    if question is not None and not question.strip():
        raise OptionError("the question is empty: give one with --question or on stdin")
    key = arguments.api_key or os.environ.get("CARREL_API_KEY")
    with closing(ChatClient(arguments.url, key)) as client:
        repl = Repl(
            client,
            client.model(),
            Conversation(arguments.system, document),
            options,
            console=Console(),
            notes=Console(stderr=True),
        )
        if question is not None:
            return STOPPED_EXIT_CODE if repl.ask(question.strip()).was_stopped else 0
        # gives input() its line editing and history
        importlib.import_module("readline")
        # started as a shell's background job, the process would ignore Ctrl-C
        signal.signal(signal.SIGINT, signal.default_int_handler)
        repl.run()
    return 0


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{text!r} is no number")
    return number


def _read_stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as exc:
        raise not_text("the question") from exc
