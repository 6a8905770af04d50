"""One honest client beside thousands that are not: how long its first tokens take, and what is left afterwards."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from benchmarks.errors import BenchmarkError
from benchmarks.load.besiegers import Repulse, Siege
from benchmarks.load.client import LoadClient, RequestFailed
from benchmarks.load.questions import Answer, Question
from benchmarks.load.requests import Percentiles

PAUSE_S = 0.2
# All that the siege took is free so long after it.
FREE_S = 90.0


@dataclass
class SiegeRow:
    """First tokens of the honest client in seconds, alone and besieged. gauges: (alone, afterwards) of what must be
    free again. num_failed: of its requests. load_average: of a minute, (alone, median besieged)."""

    seconds: float
    alone: Percentiles | None = None
    besieged: Percentiles | None = None
    num_alone: int = 0
    num_besieged: int = 0
    num_failed: int = 0
    error: str | None = None
    free_after_s: float | None = None
    gauges: dict[str, list[float]] = field(default_factory=dict)
    repulse: Repulse | None = None
    load_average: list[float] = field(default_factory=list)


class Honest:
    """One client with a key of its own, that asks when it was answered."""

    def __init__(self, client: LoadClient, model: str, question: Question) -> None:
        self._client, self._model, self._question = client, model, question
        self._number = 0
        self.num_failed = 0
        self.error: str | None = None

    async def ask(self, seconds: float) -> list[float]:
        """The seconds to each first token. No two prompts share what is known."""
        end, waits = time.monotonic() + seconds, list[float]()
        while time.monotonic() < end:
            self._number += 1
            answer, asked = Answer(), time.monotonic()
            body = self._question.body(self._model, cache_salt=f"honest {self._number}")
            try:
                await answer.read(self._client, body)
            except RequestFailed as failure:
                self.num_failed += 1
                self.error = self.error or str(failure)
            if answer.first_at is not None:
                waits.append(answer.first_at - asked)
            await asyncio.sleep(PAUSE_S)
        return waits


async def run_siege(
    siege: Siege,
    honest: Honest,
    gauges: Callable[[], Awaitable[Mapping[str, float]]],
    alone_s: float,
    tell: Callable[[str], Any],
) -> SiegeRow:
    """The honest client for alone_s, then the siege about it. gauges: what must be afterwards what it was before.
    Raises BenchmarkError."""
    row = SiegeRow(siege.seconds)
    await honest.ask(min(10.0, alone_s))
    waits = await honest.ask(alone_s)
    row.alone, row.num_alone, loads = Percentiles.of(waits), len(waits), [os.getloadavg()[0]]
    await asyncio.sleep(1.0)
    before = await gauges()
    tell(f"alone: {row.alone}")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.load.besiegers"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        besiegers = asyncio.create_task(process.communicate(json.dumps(asdict(siege)).encode()))
        waits, during = [], list[float]()
        end = time.monotonic() + siege.seconds
        while time.monotonic() < end and not besiegers.done():
            waits += await honest.ask(min(10.0, max(0.0, end - time.monotonic())))
            during.append(os.getloadavg()[0])
            row.besieged, row.num_besieged = Percentiles.of(waits), len(waits)
            tell(f"besieged: {row.besieged}, {honest.num_failed} failed")
        told, _ = await besiegers
    finally:
        if process.returncode is None:
            process.kill()
    if not told:
        raise BenchmarkError("the besiegers' process ended early")
    row.repulse = Repulse(**json.loads(told))
    row.num_failed, row.error = honest.num_failed, honest.error
    row.load_average = [round(loads[0], 2), round(median(during), 2)]
    await _wait_free(row, before, gauges)
    return row


async def _wait_free(
    row: SiegeRow, before: Mapping[str, float], gauges: Callable[[], Awaitable[Mapping[str, float]]]
) -> None:
    begin = time.monotonic()
    while True:
        after = await gauges()
        row.gauges = {name: [before.get(name, 0.0), value] for name, value in after.items()}
        if all(value <= before.get(name, 0.0) for name, value in after.items()):
            row.free_after_s = round(time.monotonic() - begin, 1)
            return
        if time.monotonic() - begin > FREE_S:
            return
        await asyncio.sleep(1.0)
