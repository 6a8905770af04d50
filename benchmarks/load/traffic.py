"""Classes of requests side by side on one server: chats that arrive at random, documents at once, clients in a loop."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from random import Random

from benchmarks.load.client import LoadClient, RequestFailed
from benchmarks.load.requests import Asked, Percentiles, RequestResult

_SPEC = re.compile(
    r"(?P<name>[\w-]+)=(?:(?P<shared>\d+K?)~)?(?:(?P<opening>\d+K?):)?(?P<prompt>\d+K?)\+(?P<output>\d+)(?:\*(?P<turns>\d+))?"
    r"(?:@(?P<rate>\d+(?:\.\d+)?)|x(?P<count>\d+)(?:/(?P<at_once>\d+))?)"
)

# Means of `usage.carrel`.
REPORTED = ("attended_tokens", "hit_rate", "bytes_moved")


@dataclass(frozen=True)
class TrafficClass:
    """Conversations of one kind. rate: they arrive at random, so many a second in the mean (Poisson), while the traffic
    lasts. count: so many in all, `at_once` of them at a time, from the start.

    turns: requests of a conversation, one after the other; each prompt has all of the one before, as many tokens in
    place of its answer, and `prompt_tokens` more. shared_tokens: with which all prompts of the class begin.
    opening_tokens: each conversation's own, after them.
    """

    name: str
    prompt_tokens: int
    max_tokens: int
    rate: float | None = None
    count: int | None = None
    at_once: int | None = None
    shared_tokens: int = 0
    turns: int = 1
    opening_tokens: int = 0

    @classmethod
    def parse(cls, text: str) -> TrafficClass:
        """`chats=512+64@3`: 512 tokens and 64 to answer, 3 a second. `documents=100K+64x3`: three at once.
        `batch=16K+128x16/8`: 16, 8 at a time. `agents=8K~512+64*4@1`: after 8,000 tokens that all share, four turns.
        `known=8K:512+64*4x3`: after 8,000 of each conversation's own. Raises ValueError."""
        if (found := _SPEC.fullmatch(text)) is None:
            raise ValueError(
                f"{text!r} is no class of requests; write NAME=[SHARED~][OPENING:]PROMPT+OUTPUT[*TURNS]@RATE, such as "
                "chats=512+64@3, or NAME=[SHARED~][OPENING:]PROMPT+OUTPUT[*TURNS]xCOUNT[/AT_ONCE], such as "
                "documents=100K+64x3"
            )
        rate, count, at_once = found["rate"], found["count"], found["at_once"]
        made = cls(
            found["name"],
            _tokens(found["prompt"]),
            int(found["output"]),
            float(rate) if rate else None,
            int(count) if count else None,
            int(at_once or count) if count else None,
            _tokens(found["shared"] or "0"),
            int(found["turns"] or 1),
            _tokens(found["opening"] or "0"),
        )
        if 0 in (made.prompt_tokens, made.max_tokens, made.rate, made.count, made.at_once, made.turns):
            raise ValueError(f"{text!r}: no number may be 0")
        return made

    def num_tokens(self, turn: int) -> int:
        """Return the prompt's length in a conversation's turn; turns are counted from 0."""
        before = self.shared_tokens + self.opening_tokens
        return before + (turn + 1) * self.prompt_tokens + turn * self.max_tokens

    def arrivals(self, seconds: float, rng: Random) -> list[float]:
        """When its requests come, in seconds from the start."""
        if self.rate is None:
            return [0.0] * (self.count or 0)
        times = []
        now = rng.expovariate(self.rate)
        while now < seconds:
            times.append(now)
            now += rng.expovariate(self.rate)
        return times


def _tokens(text: str) -> int:
    return int(text[:-1]) * 1000 if text.endswith("K") else int(text)


@dataclass(frozen=True)
class Slo:
    """Limits of a good request: its first token, and its mean time a token, in ms. None: no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def holds(self, result: RequestResult) -> bool:
        ttft_ms, tpot_s = 1e3 * result.ttft_s, result.tpot_s
        return (self.ttft_ms is None or ttft_ms <= self.ttft_ms) and (
            self.tpot_ms is None or tpot_s is None or 1e3 * tpot_s <= self.tpot_ms
        )


@dataclass(frozen=True)
class ClassRow:
    """Outcome of one class. gap_ms: between two pieces of a stream, over all streams; gap_p999_ms likewise.
    first_ttft_ms: of first turns, later_ttft_ms: of the others; `ttft_ms` counts both. cached_tokens: of the prompts,
    as the server reports. num_pieces: of all streams. attended_tokens, hit_rate, bytes_moved: means over requests.
    None: the server, or older JSON, does not have it.

    Throughputs and goodput, requests a second that kept the SLO, are over the whole traffic's duration. error: of the
    first that failed.
    """

    traffic: TrafficClass
    policy: str | None
    num_done: int
    num_failed: int
    error: str | None
    duration_s: float
    ttft_ms: Percentiles | None
    gap_ms: Percentiles | None
    gap_p999_ms: float | None
    tpot_ms: Percentiles | None
    latency_ms: Percentiles | None
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    goodput: float
    later_ttft_ms: Percentiles | None = None
    cached_tokens: int = 0
    first_ttft_ms: Percentiles | None = None
    num_pieces: int | None = None
    attended_tokens: float | None = None
    hit_rate: float | None = None
    bytes_moved: float | None = None


async def run_traffic(
    client: LoadClient,
    model: str,
    classes: Sequence[TrafficClass],
    asked: Asked,
    seconds: float,
    seed: str,
    slo: Slo,
    answered: Callable[[], None],
) -> list[ClassRow]:
    """All classes at once; ends when every request is answered.

    asked: policy and budget; each class has its own length. Prompts are made before the clock starts. Raises
    BenchmarkError when the server cannot make them; a request that fails is counted.
    """
    results: dict[str, list[list[RequestResult]]] = {
        each.name: [[] for _ in range(each.turns)] for each in classes
    }
    errors: dict[str, list[str]] = {each.name: [] for each in classes}

    async def converse(
        each: TrafficClass, prompts: list[list[int] | str], at: float, limit: asyncio.Semaphore
    ) -> None:
        await asyncio.sleep(max(0.0, begin + at - time.perf_counter()))
        async with limit:
            for turn, prompt in enumerate(prompts):
                whole = replace(asked, max_tokens=each.max_tokens)
                try:
                    results[each.name][turn].append(await client.complete(model, prompt, whole))
                except RequestFailed as exc:
                    errors[each.name].append(str(exc))
                    break
                answered()

    plan = []
    for each in classes:
        limit = asyncio.Semaphore(each.at_once or 1 << 20)
        shared = await client.prompt(each.shared_tokens, f"{seed}:{each.name}")
        for index, at in enumerate(each.arrivals(seconds, Random(f"{seed}:{each.name}"))):
            own = await client.prompt(each.num_tokens(each.turns - 1), f"{seed}:{each.name}:{index}")
            plan.append((each, [_prompt(each, turn, shared, own) for turn in range(each.turns)], at, limit))
    begin = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for arrival in plan:
            group.create_task(converse(*arrival))
    duration = time.perf_counter() - begin
    return [
        _row(each, asked.policy, results[each.name], errors[each.name], duration, slo) for each in classes
    ]


def _prompt(each: TrafficClass, turn: int, shared: list[int] | str, own: list[int] | str) -> list[int] | str:
    """A turn's: what the class shares, and the conversation's own up to there, in tokens or in words."""
    count = each.num_tokens(turn) - each.shared_tokens
    if isinstance(shared, str) or isinstance(own, str):
        return " ".join([*str(shared).split(), *str(own).split()[:count]])
    return shared + own[:count]


def _row(
    each: TrafficClass,
    policy: str | None,
    turns: Sequence[Sequence[RequestResult]],
    errors: Sequence[str],
    duration_s: float,
    slo: Slo,
) -> ClassRow:
    results = [result for turn in turns for result in turn]
    gaps = sorted(1e3 * gap for result in results for gap in result.gaps_s)
    return ClassRow(
        traffic=each,
        policy=policy,
        num_done=len(results),
        num_failed=len(errors),
        error=errors[0] if errors else None,
        duration_s=duration_s,
        ttft_ms=Percentiles.of(1e3 * result.ttft_s for result in results),
        gap_ms=Percentiles.of(gaps),
        gap_p999_ms=gaps[min(len(gaps) - 1, int(0.999 * len(gaps)))] if gaps else None,
        tpot_ms=Percentiles.of(1e3 * tpot for tpot in _known(result.tpot_s for result in results)),
        latency_ms=Percentiles.of(1e3 * result.end_s for result in results),
        output_tokens_per_s=sum(result.completion_tokens for result in results) / duration_s,
        prompt_tokens_per_s=sum(result.prompt_tokens for result in results) / duration_s,
        goodput=sum(slo.holds(result) for result in results) / duration_s,
        later_ttft_ms=Percentiles.of(1e3 * result.ttft_s for turn in turns[1:] for result in turn),
        cached_tokens=sum(result.cached_tokens for result in results),
        first_ttft_ms=Percentiles.of(1e3 * result.ttft_s for result in turns[0]),
        num_pieces=sum(result.num_pieces for result in results),
        **{name: _mean(result.carrel.get(name) for result in results) for name in REPORTED},
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [*_known(values)]
    return sum(known) / len(known) if known else None


def _known(values: Iterable[float | None]) -> Iterable[float]:
    return (value for value in values if value is not None)
