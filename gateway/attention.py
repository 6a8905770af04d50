"""Views of what running requests attend, as the worker reports them: the newest of each, for its owner."""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field

from gateway.admission import Shares
from gateway.errors import UnknownAttention
from gateway.worker_client import TokenSource
from gpu_worker.v1 import gpu_worker_pb2 as pb

# requests that are shown or can still be: one sight of each, of 128 KiB at most
MAX_VIEWS = 64
# streams of sights that are open at once, in all and of one key: each takes time of the event loop with every sight
MAX_READERS, MAX_KEY_READERS = 64, 16


@dataclass
class View:
    """One request's newest sight; `changed` is replaced, and set, whenever there is a newer one or none will come."""

    request_id: str
    prompt_tokens: int
    latest: pb.Attention | None = None
    # pictures of one sight, by layer and KV head: each is drawn once, however many readers it has
    drawn_of: pb.Attention | None = None
    drawn: dict[tuple[int | None, int | None], asyncio.Task[bytes]] = field(default_factory=dict)
    is_over: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, sight: pb.Attention | None) -> None:
        """None: the request has ended."""
        self.latest, self.is_over = sight or self.latest, sight is None
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    async def sights(self) -> AsyncGenerator[pb.Attention, None]:
        """The newest, then newer ones as they come, to the request's end; a reader that lags misses some."""
        told: pb.Attention | None = None
        while True:
            changed = self.changed
            if self.latest is not None and self.latest is not told:
                told = self.latest
                yield told
            elif self.is_over:
                return
            else:
                await changed.wait()


class AttentionViews:
    """The views of the last `MAX_VIEWS` requests that asked for one; each is its caller's alone. `readers` bounds their
    streams."""

    def __init__(self, has_several_keys: Callable[[], bool] = lambda: True) -> None:
        self.readers = Shares("open streams of attention", MAX_READERS, MAX_KEY_READERS, has_several_keys)
        self._views: OrderedDict[tuple[bytes, str], View] = OrderedDict()

    def open(self, caller: bytes, request_id: str, prompt_tokens: int) -> View:
        """Open the view of a request that begins, in place of an older one with the same id."""
        view = View(request_id, prompt_tokens)
        self._views.pop((caller, request_id), None)
        self._views[caller, request_id] = view
        while len(self._views) > MAX_VIEWS:
            _, oldest = self._views.popitem(last=False)
            oldest.put(None)
        return view

    def get(self, caller: bytes, name: str) -> View:
        """By the request's id or that of its answer, which has a word before it. Raises UnknownAttention."""
        for request_id in (name, re.split("[-_]", name, maxsplit=1)[-1]):
            if (view := self._views.get((caller, request_id))) is not None:
                return view
        raise UnknownAttention(name)


class WatchedWorker:
    """The worker as choices see it: what it tells of attention goes to the request's view, and not to them. Of several
    choices the first is shown."""

    def __init__(self, worker: TokenSource, views: AttentionViews) -> None:
        self._worker = worker
        self._views = views

    async def generate(
        self, request: pb.GenerateRequest, timeout_s: float
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """As `TokenSource.generate`."""
        # the gateway's ids end with the choice's number, and a part that nobody guesses
        request_id, number, _ = request.request_id.rsplit("-", 2)
        request.attention = request.attention and number == "0"
        view: View | None = None
        if request.attention:
            view = self._views.open(request.prefix_salt, request_id, len(request.prompt_token_ids))
        try:
            async with aclosing(self._worker.generate(request, timeout_s)) as events:
                async for event in events:
                    if not event.HasField("attention"):
                        yield event
                    elif view is not None:
                        view.put(event.attention)
        finally:
            if view is not None:
                view.put(None)

    async def abort(self, request_id: str) -> None:
        """As `TokenSource.abort`."""
        await self._worker.abort(request_id)
