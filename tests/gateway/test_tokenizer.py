"""Tokenizing beside the event loop."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from waiting import PATIENCE

from gateway.tokenizer import Tokenizer, load_tokenizer

LONG = "the fox 🦊 " * 4_000


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return load_tokenizer(model_dir, None)


def turns_beside(work: Callable[[], object]) -> int:
    """How many turns an event loop takes from the work's beginning in a thread to its end; nothing takes Python's lock
    from a thread but what gives it up."""
    marks: list[str] = []

    def marked() -> None:
        marks.append("begun")
        work()
        marks.append("done")

    async def count() -> int:
        task, turns = asyncio.create_task(asyncio.to_thread(marked)), 0
        while len(marks) < 2:
            turns += len(marks)
            await asyncio.sleep(0)
        await task
        return turns

    interval = sys.getswitchinterval()
    sys.setswitchinterval(PATIENCE)
    try:
        return asyncio.run(count())
    finally:
        sys.setswitchinterval(interval)


def test_a_long_text_is_tokenized_and_told_beside_the_event_loop(tokenizer: Tokenizer) -> None:
    assert turns_beside(lambda: tokenizer.encode(LONG, True)) > 0
    token_ids = tokenizer.encode(LONG, True)
    assert turns_beside(lambda: tokenizer.decode_prompt(token_ids)) > 0


def test_a_prompt_is_decoded_as_its_tokens_are(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("<|user|>the fox 🦊<|end|>", True)
    assert tokenizer.decode_prompt(token_ids) == tokenizer.decode(token_ids) == "the fox 🦊"
