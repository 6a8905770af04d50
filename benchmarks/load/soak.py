"""Many mixed streams for minutes: answers as those alone, nothing fails, and nothing grows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import takewhile
from random import Random
from typing import Any

from benchmarks.load.client import LoadClient, RequestFailed

# One request of so many is aborted in mid-answer, one goes on with a session, one has a salt that nobody had.
ABORTED, IN_SESSION, SALTED = 8, 4, 2
NUM_SESSIONS = 8
# From when on nothing may grow: every question was asked many times.
SETTLED_SHARE = 0.25


@dataclass(frozen=True)
class Question:
    """A prompt of token ids, the policy that is asked for (None: the server's), and the answer's most tokens."""

    prompt: tuple[int, ...]
    policy: str | None
    max_tokens: int

    def body(self, model: str, **extra: Any) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": model,
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            **extra,
        }
        if self.policy is not None:
            body["carrel"] = {"policy": self.policy}
        return body


@dataclass(frozen=True)
class Meter:
    """One gauge: when a quarter of the time was over, its most from then on, and its last, with nobody asking."""

    name: str
    settled: float
    most: float
    last: float


@dataclass
class SoakRow:
    """What came of a soak. num_differing: answers that were not what the same question got alone; first_difference:
    where the first of them left it, as a share of the answer."""

    num_streams: int
    seconds: float
    num_questions: int
    num_answered: int = 0
    num_aborted: int = 0
    num_failed: int = 0
    num_differing: int = 0
    first_difference: float | None = None
    error: str | None = None
    meters: list[Meter] = field(default_factory=list)


async def questions(
    client: LoadClient, count: int, most_tokens: int, policies: tuple[str | None, ...], seed: str
) -> list[Question]:
    """Short ones and long ones, up to `most_tokens`, over all policies."""
    rng, made = Random(seed), []
    for index in range(count):
        longest = most_tokens if index % 4 == 0 else max(16, most_tokens // 16)
        ids = await client.token_ids(rng.randint(max(8, longest // 4), longest), f"{seed}:{index}")
        made.append(Question(tuple(ids), policies[index % len(policies)], rng.choice((16, 32, 64))))
    return made


async def run_soak(
    client: LoadClient,
    model: str,
    asked: list[Question],
    num_streams: int,
    seconds: float,
    seed: str,
    gauges: Callable[[], Awaitable[Mapping[str, float]]],
    tell: Callable[[SoakRow], None],
    every: float,
) -> SoakRow:
    """Ask each question alone, then all of them at random from so many clients. gauges: what is to stay flat, asked
    once in `every` seconds. tell: how it goes, as often. Raises BenchmarkError, or RequestFailed where a question
    alone is not answered."""
    alone = [await _answer(client, question.body(model)) for question in asked]
    row = SoakRow(num_streams, seconds, len(asked))
    begin, samples = time.monotonic(), list[tuple[float, Mapping[str, float]]]()

    async def ask(number: int) -> None:
        rng = Random(f"{seed}:{number}")
        while time.monotonic() - begin < seconds:
            await _ask_one(client, model, asked, alone, rng, row)

    async def watch() -> None:
        while time.monotonic() - begin < seconds:
            samples.append((time.monotonic() - begin, await gauges()))
            tell(row)
            await asyncio.sleep(every)

    async with asyncio.TaskGroup() as group:
        group.create_task(watch())
        for number in range(num_streams):
            group.create_task(ask(number))
    # What was aborted last ends a moment later.
    await asyncio.sleep(every)
    last = await gauges()
    settled = [sample for at, sample in samples if at >= SETTLED_SHARE * seconds] or [last]
    row.meters = [
        Meter(name, settled[0].get(name, 0.0), max(sample.get(name, 0.0) for sample in settled), value)
        for name, value in last.items()
    ]
    return row


async def _ask_one(
    client: LoadClient,
    model: str,
    asked: list[Question],
    alone: list[str],
    rng: Random,
    row: SoakRow,
) -> None:
    index = rng.randrange(len(asked))
    extra: dict[str, Any] = {"priority": rng.choice((0, 0, 1))}
    if rng.randrange(IN_SESSION) == 0:
        extra["session_id"] = f"soak-{rng.randrange(NUM_SESSIONS)}"
    if rng.randrange(SALTED) == 0:
        extra["cache_salt"] = str(rng.getrandbits(64))
    most = rng.randrange(1, 16) if rng.randrange(ABORTED) == 0 else None
    try:
        answer = await _answer(client, asked[index].body(model, **extra), most)
    except RequestFailed as error:
        row.num_failed += 1
        row.error = row.error or str(error)
        return
    row.num_aborted += most is not None
    row.num_answered += most is None
    expected = alone[index] if most is None else alone[index][: len(answer)]
    if answer != expected:
        row.num_differing += 1
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(answer, expected, strict=False)))
        earliest = 1.0 if row.first_difference is None else row.first_difference
        row.first_difference = min(earliest, same / max(1, len(expected)))


async def _answer(client: LoadClient, body: dict[str, Any], most: int | None = None) -> str:
    """The text of an answer; the stream is left after `most` pieces of it. Raises RequestFailed."""
    text: list[str] = []
    async with aclosing(client.pieces(body)) as pieces:
        async for piece in pieces:
            text += [choice["text"] for choice in piece.get("choices", ())]
            if most is not None and len(text) >= most:
                break
    return "".join(text)
