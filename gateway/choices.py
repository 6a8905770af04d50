"""The choices of a request: which of them run now, their events as one stream, and what they cost together."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from gateway.admission import Place
from gateway.choice import Choice
from gateway.errors import Overloaded
from gateway.exchange import Event, Prefilling, Usage
from gpu_worker.v1 import gpu_worker_pb2 as pb

MAX_PENDING_EVENTS = 64


class Choices:
    """Iterate `events` once.

    A prompt is computed for its first choice: the others begin when that has a token, and take the prompt from the
    worker's prefix cache where their policy shares it; where not, they compute it again. At most `limit` choices run at
    once, and each beside the first that runs needs a place of its own; the others wait.
    """

    def __init__(self, prompts: Sequence[Sequence[Choice]], limit: int, place: Place) -> None:
        """prompts: the choices of each, at least one. place: of the request."""
        self._limit = limit
        self._place = place
        self._ready = deque(choices[0] for choices in prompts)
        self._followers = {choices[0]: choices[1:] for choices in prompts}
        self._running: dict[Choice, asyncio.Task[None]] = {}
        self._has_begun = False
        self._queue: asyncio.Queue[tuple[Choice, Event | BaseException | None]] = asyncio.Queue(
            MAX_PENDING_EVENTS
        )

    async def events(self) -> AsyncGenerator[Event, None]:
        """Events of all choices as they come, each choice's in order. The first error ends all of them, and so does
        closing this. A reader that lags stops the choices once `MAX_PENDING_EVENTS` wait.
        """
        if len(self._ready) == 1 and not any(self._followers.values()):
            async with aclosing(self._ready.popleft().events()) as alone:
                async for event in alone:
                    yield event
            return
        self._start()
        try:
            while self._running:
                if (taken := self._take(*await self._queue.get())) is not None:
                    yield taken
        finally:
            for task in self._running.values():
                task.cancel()
            await asyncio.gather(*self._running.values(), return_exceptions=True)

    def _start(self) -> None:
        """As many as may run."""
        while self._ready and len(self._running) < self._limit:
            if self._running and not self._place.widen():
                return
            choice = self._ready.popleft()
            self._running[choice] = asyncio.create_task(self._pump(choice))

    def _take(self, choice: Choice, item: Event | BaseException | None) -> Event | None:
        """Note what a choice says, None at its end, and start what may run now. Raises its error."""
        match item:
            case BaseException():
                raise item
            case Prefilling():
                return item
            case None:
                del self._running[choice]
                if self._running:
                    self._place.narrow()
        self._has_begun = True
        # Before other prompts, while theirs is in the cache.
        self._ready.extendleft(reversed(self._followers.pop(choice, ())))
        self._start()
        return item

    async def _pump(self, choice: Choice) -> None:
        try:
            async with aclosing(self._tries(choice)) as events:
                async for event in events:
                    await self._queue.put((choice, event))
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:
            # raised again by the reader; also a panic of a library in Rust, which is no Exception
            await self._queue.put((choice, error))
        else:
            await self._queue.put((choice, None))

    async def _tries(self, choice: Choice) -> AsyncGenerator[Event, None]:
        """Its events. An answer that has begun is not cut off for want of room: what is left of it asks again."""
        while True:
            try:
                async with aclosing(choice.events()) as events:
                    async for event in events:
                        yield event
                return
            except Overloaded as error:
                if choice.num_tokens or not self._has_begun:
                    raise
                await asyncio.sleep(error.retry_after_s or 0)


def total_usage(
    prompts: Sequence[Sequence[Choice]], num_prompt_tokens: Sequence[int], started_at: float
) -> Usage:
    """Usage of all choices; each prompt counts once, however many choices it has. prompts: the choices of each."""
    choices = [choice for of_prompt in prompts for choice in of_prompt]
    first_token_at = min((choice.first_token_at or started_at for choice in choices), default=started_at)
    return Usage(
        prompt_tokens=sum(num_prompt_tokens),
        completion_tokens=sum(choice.num_tokens for choice in choices),
        ttft_ms=(first_token_at - started_at) * 1000,
        worker=_combine(prompts),
    )


def _combine(prompts: Sequence[Sequence[Choice]]) -> pb.Usage | None:
    """The worker's account of all choices: sums, means and maxima, as docs/api.md says."""
    accounts = [[choice.usage for choice in choices if choice.usage is not None] for choices in prompts]
    usages = [usage for of_prompt in accounts for usage in of_prompt]
    if not usages:
        return None
    total = pb.Usage(policy=usages[0].policy)
    total.cached_tokens = sum(
        min((each.cached_tokens for each in of_prompt), default=0) for of_prompt in accounts
    )
    for name in ("offloaded_tokens", "bytes_moved"):
        setattr(total, name, sum(getattr(usage, name) for usage in usages))
    for name in ("attended_tokens", "window_tokens", "hit_rate"):
        setattr(total, name, sum(getattr(usage, name) for usage in usages) / len(usages))
    for name in ("budget_tokens", "context_tokens", "queue_ms", "prefill_ms", "index_wait_ms", "decode_ms"):
        setattr(total, name, max(getattr(usage, name) for usage in usages))
    return total
