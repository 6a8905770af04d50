"""Many mixed streams for minutes, with faults meanwhile: answers as those alone or errors, and nothing grows."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import cycle
from random import Random
from statistics import median
from typing import Any

from benchmarks.errors import BenchmarkError
from benchmarks.load.client import LoadClient, RequestFailed
from benchmarks.load.processes import ROUND, Blow, Server, is_gone
from benchmarks.load.questions import MARGINS, Answer, Question
from benchmarks.load.soak_row import Ending, Meter, Sample, SoakRow, Struck, Waits, Wrong

# One request of so many is aborted in mid-answer, one goes on with a session, one has a salt that nobody had.
ABORTED, IN_SESSION, SALTED = 8, 4, 2
NUM_SESSIONS = 8
# From when on nothing may grow: every question was asked many times.
SETTLED_SHARE = 0.25
# A client that got an error asks again after so long, and gives a question up after so many.
AGAIN_S, PATIENCE_S = 1.0, 180.0
# All serve again within so long, however they were struck; what has gone takes a moment to be missed.
RECOVERY_S, MISSED_S = 110.0, 8.0
# Streams pause for a look at what is left so long before a fault.
LOOK_S = 45.0


@dataclass(frozen=True)
class Plan:
    """fault_every: seconds from one fault to the next; 0: none. every: between two looks. near_tie: in nats; an answer
    that first leaves the one alone where that one's two best tokens are nearer than this differs by rounding."""

    num_streams: int
    seconds: float
    seed: str
    every: float
    fault_every: float = 0.0
    near_tie: float = 0.0


@dataclass(frozen=True)
class Wait:
    """Times of one question: asked, and its first token."""

    asked_s: float
    first_s: float

    @property
    def seconds(self) -> float:
        return self.first_s - self.asked_s


class Soak:
    """One run. `row` may be looked at, or kept by `keep`, at any time."""

    def __init__(
        self,
        client: LoadClient,
        model: str,
        asked: list[Question],
        plan: Plan,
        gauges: Callable[[], Awaitable[Mapping[str, float]]],
        keep: Callable[[SoakRow], None] = lambda row: None,
        server: Server | None = None,
    ) -> None:
        """gauges: what is to stay flat; what is away is missing in it. keep: is given the row after each fault.
        server: whose processes the faults strike."""
        self._client, self._model, self._asked, self._plan = client, model, asked, plan
        self._gauges, self._keep, self._server = gauges, keep, server
        self._alone: list[Answer] = []
        self._goes = asyncio.Event()
        self._num_busy = 0
        self._waits: list[Wait] = []
        self._ends: list[tuple[float, float, str]] = []
        self._loads: list[float] = []
        self._pauses: list[float] = []
        self.row = SoakRow(plan.num_streams, plan.seconds, len(asked))

    async def run(self) -> SoakRow:
        """Ask each question alone, then all of them at random from so many clients. Raises BenchmarkError, or
        RequestFailed where a question alone is not answered."""
        for question in self._asked:
            answer = Answer()
            extra = MARGINS if self._plan.near_tie else {}
            await answer.read(self._client, question.body(self._model, **extra))
            self._alone.append(answer)
        self._begin = time.monotonic()
        self._goes.set()
        try:
            await self._go()
        except* BenchmarkError as errors:
            raise errors.exceptions[0] from None
        # What was aborted last ends a moment later.
        await asyncio.sleep(self._plan.every)
        await self._look(is_idle=True)
        self._sum_up()
        return self.row

    async def _go(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch())
            for number in range(self._plan.num_streams):
                group.create_task(self._ask(number))
            if self._plan.fault_every:
                group.create_task(self._strike())

    @property
    def _now(self) -> float:
        return time.monotonic() - self._begin

    @property
    def _is_over(self) -> bool:
        return self._now >= self._plan.seconds

    async def _watch(self) -> None:
        while not self._is_over:
            await self._look(is_idle=False)
            await asyncio.sleep(self._plan.every)

    async def _look(self, is_idle: bool) -> None:
        values = {name: round(value, 1) for name, value in (await self._gauges()).items()}
        self.row.samples.append(Sample(round(self._now, 1), is_idle, values))
        self._loads.append(os.getloadavg()[0])

    async def _strike(self) -> None:
        """Each process in turn, killed in one round and stopped in the next; a look at an idle server before each."""
        for number, blow in enumerate(cycle(ROUND)):
            due = (number + 1) * self._plan.fault_every
            if due + RECOVERY_S > self._plan.seconds:
                return
            await asyncio.sleep(max(0.0, due - LOOK_S - self._now))
            await self._pause()
            await asyncio.sleep(max(0.0, due - self._now))
            if self._server is not None and self._server.is_whole():
                await self._strike_one(self._server, blow)
            self._sum_up()
            self._keep(self.row)

    async def _strike_one(self, server: Server, blow: Blow) -> None:
        fault = Struck(blow.who, blow.how, round(self._now, 1))
        self.row.faults.append(fault)
        pid = server.strike(blow)
        gone_at: float | None = None
        was_away = False
        while self._now - fault.at_s < RECOVERY_S:
            await asyncio.sleep(0.25)
            if gone_at is None:
                gone_at = self._now if is_gone(pid) else None
                continue
            if not await self._client.is_ready() or not server.is_whole():
                was_away = True
            elif was_away or self._now - gone_at > MISSED_S:
                self.row.faults[-1] = replace(fault, ready_s=round(self._now, 1))
                return

    async def _pause(self) -> None:
        self._goes.clear()
        self._pauses.append(self._now)
        begun = self._now
        while self._num_busy and self._now - begun < LOOK_S / 2:
            await asyncio.sleep(0.2)
        await asyncio.sleep(min(2.0, self._plan.every))
        if not self._num_busy:
            await self._look(is_idle=True)
        self._goes.set()

    async def _ask(self, number: int) -> None:
        rng = Random(f"{self._plan.seed}:{number}")
        while not self._is_over:
            await self._goes.wait()
            with self._busy():
                await self._ask_one(rng)

    @contextmanager
    def _busy(self) -> Iterator[None]:
        self._num_busy += 1
        try:
            yield
        finally:
            self._num_busy -= 1

    async def _ask_one(self, rng: Random) -> None:
        """One question until it is answered, as a client would who asks again after an error."""
        index = rng.randrange(len(self._asked))
        extra: dict[str, Any] = {"priority": rng.choice((0, 0, 1))}
        if rng.randrange(IN_SESSION) == 0:
            extra["session_id"] = f"soak-{rng.randrange(NUM_SESSIONS)}"
        if is_salted := rng.randrange(SALTED) == 0:
            extra["cache_salt"] = str(rng.getrandbits(64))
        most = rng.randrange(1, 16) if rng.randrange(ABORTED) == 0 else None
        body = self._asked[index].body(self._model, **extra)
        first_asked = self._now
        while self._now - first_asked < PATIENCE_S:
            asked_s, answer = self._now, Answer()
            try:
                await answer.read(self._client, body, most)
            except RequestFailed as error:
                self._ends.append((asked_s, self._now, error.code))
                self._check(index, answer, is_salted, is_whole=False)
                if not self._is_in_fault(asked_s, self._now):
                    self.row.error = self.row.error or str(error)
                if self._plan.fault_every == 0 or self._is_over:
                    return
                await asyncio.sleep(AGAIN_S)
                continue
            self.row.num_aborted += most is not None
            self.row.num_answered += most is None
            if answer.first_at is not None:
                self._waits.append(Wait(first_asked, answer.first_at - self._begin))
            self._check(index, answer, is_salted, is_whole=most is None)
            return

    def _check(self, index: int, answer: Answer, is_salted: bool, is_whole: bool) -> None:
        alone, row = self._alone[index], self.row
        departure = answer.departure(alone, is_whole)
        if departure is None:
            return
        same, margin = departure
        if margin < self._plan.near_tie:
            row.num_tied += 1
            row.widest_tie = max(row.widest_tie or 0.0, margin)
            return
        wrong = Wrong.of(self._now, self._asked[index], is_salted, same, margin)
        row.count_wrong(wrong, len(alone.tokens))

    def _is_in_fault(self, begin: float, end: float) -> bool:
        return any(begin <= _until(fault, self._now) and end >= fault.at_s for fault in self.row.faults)

    def _sum_up(self) -> None:
        row, now = self.row, self._now
        row.ran_s = round(now, 1)
        inside = [end for end in self._ends if self._is_in_fault(end[0], end[1])]
        row.num_ended, row.num_failed = len(inside), len(self._ends) - len(inside)
        row.endings = [
            Ending(code or "none", count)
            for code, count in Counter(end[2] for end in self._ends).most_common()
        ]
        row.faults = [self._around(fault, now) for fault in row.faults]
        row.load_average = [round(median(self._loads), 2), round(max(self._loads), 2)] if self._loads else []
        row.meters = self._meters()

    def _around(self, fault: Struck, now: float) -> Struck:
        ready = _until(fault, now)
        since = max((at for at in self._pauses if at < fault.at_s), default=0.0)
        until = min((at for at in self._pauses if at > ready), default=now)
        return replace(
            fault,
            num_ended=sum(1 for asked, end, _ in self._ends if asked <= ready and end >= fault.at_s),
            before=Waits.of(w.seconds for w in self._waits if w.asked_s > since and w.first_s < fault.at_s),
            during=Waits.of(w.seconds for w in self._waits if w.asked_s <= ready and w.first_s >= fault.at_s),
            after=Waits.of(w.seconds for w in self._waits if w.asked_s > ready and w.first_s < until),
        )

    def _meters(self) -> list[Meter]:
        last = self.row.samples[-1]
        settled = [s for s in self.row.samples if s.at_s >= SETTLED_SHARE * self._plan.seconds] or [last]
        return [
            Meter(
                name, settled[0].values.get(name, 0.0), max(s.values.get(name, 0.0) for s in settled), value
            )
            for name, value in last.values.items()
            if not name.endswith(" pid")
        ]


def _until(fault: Struck, now: float) -> float:
    """When a fault was over."""
    return min(now, fault.at_s + RECOVERY_S) if fault.ready_s is None else fault.ready_s
