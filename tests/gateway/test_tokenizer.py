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


def lets_others_run(work: Callable[[], object], most_runs: int = 50) -> bool:
    """Return whether an event loop turns while the work runs in a thread.

    Nothing takes Python's lock from a thread but what gives it up. Work that gives it up runs until it was seen:
    on a busy machine the loop may miss a short run.
    """
    states, turns = ["waiting"], 0

    def repeated() -> None:
        states.append("running")
        for _ in range(most_runs):
            work()
            if turns:
                break
        states.append("done")

    async def count() -> None:
        nonlocal turns
        task = asyncio.create_task(asyncio.to_thread(repeated))
        while states[-1] != "done":
            turns += states[-1] == "running"
            await asyncio.sleep(0)
        await task

    interval = sys.getswitchinterval()
    sys.setswitchinterval(PATIENCE)
    try:
        asyncio.run(count())
    finally:
        sys.setswitchinterval(interval)
    return turns > 0


def test_a_long_text_is_tokenized_and_told_beside_the_event_loop(tokenizer: Tokenizer) -> None:
    assert lets_others_run(lambda: tokenizer.encode(LONG, True))
    token_ids = tokenizer.encode(LONG, True)
    assert lets_others_run(lambda: tokenizer.decode_prompt(token_ids))
    assert not lets_others_run(lambda: tokenizer.decode(token_ids), most_runs=3)


def test_a_prompt_is_decoded_as_its_tokens_are(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("<|user|>the fox 🦊<|end|>", True)
    assert tokenizer.decode_prompt(token_ids) == tokenizer.decode(token_ids) == "the fox 🦊"
