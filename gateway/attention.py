"""Views of what running requests attend, as the worker reports them: the newest of each, as JSON for its owner."""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from gateway.admission import Shares
from gateway.errors import InvalidRequest, UnknownAttention
from gateway.heavy_work import CallerWork
from gateway.rest.answers import AttentionAnswer
from gateway.worker_client import TokenSource
from gpu_worker.v1 import gpu_worker_pb2 as pb

# so that what is shared of a bucket is told to a part in ten thousand
DIGITS = 4
# fields of a sight that are told as they are
TOLD = (
    *("step", "policy", "family", "context_tokens", "shared_tokens", "host_tokens", "budget_tokens"),
    *("bytes_moved", "dense_layers", "kv_heads", "bucket_tokens"),
)
# pictures of one view that are kept, of some kilobytes each: of its newest sight, by layer and head
MAX_KEPT = 32
# about what a bucket costs, in characters of other work
BUCKET_CHARS = 16


class Pictures:
    """The pictures of one request's newest sight."""

    def __init__(self, request_id: str, prompt_tokens: int) -> None:
        self._request_id = request_id
        self._prompt_tokens = prompt_tokens
        self._sight: pb.Attention | None = None
        self._drawn: dict[tuple[int | None, int | None], asyncio.Task[bytes]] = {}

    async def draw(
        self, sight: pb.Attention, layer: int | None, kv_head: int | None, work: CallerWork
    ) -> bytes:
        """A sight as JSON: of one of its layers and KV heads, or the mean over them. Raises InvalidRequest."""
        _check_place(sight, layer, kv_head)
        if sight is not self._sight:
            self._sight, self._drawn = sight, {}
        if (drawing := self._drawn.get((layer, kv_head))) is None:
            while len(self._drawn) >= MAX_KEPT:
                del self._drawn[next(iter(self._drawn))]
            size = BUCKET_CHARS * _num_buckets(sight)
            drawing = asyncio.create_task(work.answer(size, self._json, sight, layer, kv_head))
            self._drawn[layer, kv_head] = drawing
        # a reader may leave while others wait for the same picture
        return await asyncio.shield(drawing)

    def _json(self, sight: pb.Attention, layer: int | None, kv_head: int | None) -> bytes:
        answer = _picture(sight, layer, kv_head)
        answer.id, answer.prompt_tokens = self._request_id, self._prompt_tokens
        return answer.written()


def _check_place(sight: pb.Attention, layer: int | None, kv_head: int | None) -> None:
    layers = list(sight.layers)
    if layer is not None and layer >= sight.dense_layers and layer not in layers:
        raise InvalidRequest(f"Layer {layer} is not looked at: choose one of {layers}.", "layer")
    if kv_head is not None and kv_head >= sight.kv_heads:
        raise InvalidRequest(f"There are {sight.kv_heads} KV heads, counted from 0.", "head")


def _num_buckets(sight: pb.Attention) -> int:
    return -(-sight.context_tokens // sight.bucket_tokens)


def _picture(sight: pb.Attention, layer: int | None, kv_head: int | None) -> AttentionAnswer:
    layers = list(sight.layers)
    begins = np.arange(0, sight.context_tokens, sight.bucket_tokens)
    sizes = np.minimum(begins + sight.bucket_tokens, sight.context_tokens) - begins
    place = layers.index(layer) if layer in layers else None
    is_dense = layer is not None and layer < sight.dense_layers

    def share(data: bytes) -> list[float]:
        """Return the share of each bucket's tokens; all where there is no data."""
        if is_dense or not data:
            return [1.0] * len(sizes)
        counts: npt.NDArray[Any] = np.frombuffer(data, "<u2").reshape(len(layers), sight.kv_heads, -1)
        counts = counts if place is None else counts[place : place + 1]
        counts = counts if kv_head is None else counts[:, kv_head : kv_head + 1]
        shares: list[float] = (counts.mean(axis=(0, 1)) / sizes).round(DIGITS).tolist()
        return shares

    return AttentionAnswer(
        object="attention",
        id="",
        layers=layers,
        layer=layer,
        head=kv_head,
        attended_tokens=round(sight.attended_tokens, 1),
        hit_rate=round(sight.hit_rate, DIGITS),
        attended=share(sight.attended),
        on_device=share(sight.on_device),
        **{name: getattr(sight, name) for name in TOLD},
    )


# requests that are shown or can still be: one sight of each, of 128 KiB at most
MAX_VIEWS = 64
# streams of sights that are open at once, in all and of one key: each takes time of the event loop with every sight
MAX_READERS, MAX_KEY_READERS = 64, 16


@dataclass
class View:
    """One request's newest sight; `changed` is replaced, and set, whenever there is a newer one or none will come."""

    request_id: str
    pictures: Pictures
    latest: pb.Attention | None = None
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
        view = View(request_id, Pictures(request_id, prompt_tokens))
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
