"""The command that the tests of this folder run, and a gateway with a fake worker behind it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import Command

from benchmarks.__main__ import main

sys.path.insert(0, str(Path(__file__).parents[1] / "gateway"))

from gateway_stack import Stack, running_stack, write_tokenizer


@pytest.fixture
def bench(capfd: pytest.CaptureFixture[str]) -> Command:
    return Command(main, capfd)


@pytest.fixture(scope="session")
def shared_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    model = write_tokenizer(tmp_path_factory.mktemp("tiny"))
    with running_stack(tmp_path_factory.mktemp("load"), model) as stack:
        yield stack


@pytest.fixture
def stack(shared_stack: Stack) -> Stack:
    """A server that was asked nothing so far."""
    shared_stack.say("the quick brown fox jumps over the lazy dog", token_s=0.001)
    return shared_stack
