"""`/v1/attention`: what a running request attends, and where that lives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from fastapi import Query, Response
from fastapi.responses import JSONResponse

from gateway.attention import View
from gateway.errors import InvalidRequest, ServiceError
from gateway.heavy_work import CallerWork
from gateway.rest.answers import AttentionAnswer, ErrorAnswer
from gateway.rest.bounded import ERRORS, KEY, BoundedRouter, Caller, Config, Service, streamed
from gateway.rest.errors import BodyResponse, error_body
from gateway.rest.feed import Feed
from gateway.rest.reply import EventStream, frame
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
Number = Annotated[int | None, Query(ge=0, le=99_999)]

router = BoundedRouter(dependencies=KEY, responses=ERRORS)


@router.get(
    "/v1/attention/{request_id}",
    response_model=AttentionAnswer,
    responses=streamed(AttentionAnswer, ErrorAnswer),
)
async def watch(
    request_id: str,
    caller: Caller,
    service: Service,
    config: Config,
    stream: Literal["true", "false"] = "true",
    layer: Number = None,
    head: Number = None,
) -> Response:
    """Show what a request that asked with `carrel.attention` attends, by its id: server-sent events until it ends, or
    with `stream=false` the newest one; of the KV head `head` and the layer `layer`, or the mean over them."""
    views, work = service.attention, service.work.of(caller)
    view = views.get(caller, request_id)

    async def pictures() -> AsyncGenerator[bytes, None]:
        with views.readers.held(caller):
            async with aclosing(view.sights()) as sights:
                async for sight in sights:
                    yield await draw(view, sight, layer, head, work)

    if stream == "true":
        feed = Feed(pictures())
        # it begins: a refusal has its own status
        await feed.wait(0)
        feed.check()
        return EventStream(feed, Frames(), config.heartbeat_s, config.request_timeout_s)
    if view.latest is None:
        return BodyResponse(AttentionAnswer(object="attention", id=view.request_id))
    newest = await draw(view, view.latest, layer, head, work)
    return Response(newest, media_type=JSONResponse.media_type)


class Frames:
    """Pictures as a stream."""

    end = b"data: [DONE]\n\n"

    async def frames(self, event: bytes) -> bytes:
        return b"data: %b\n\n" % event

    def failed(self, error: ServiceError | None) -> bytes:
        """Return the frame for an error; None stands for a bug."""
        return frame(error_body(error))


async def draw(
    view: View, sight: pb.Attention, layer: int | None, kv_head: int | None, work: CallerWork
) -> bytes:
    """A sight of the view as JSON: of one of its layers and KV heads, or the mean over them. Raises InvalidRequest."""
    _check_place(sight, layer, kv_head)
    if sight is not view.drawn_of:
        view.drawn_of, view.drawn = sight, {}
    if (drawing := view.drawn.get((layer, kv_head))) is None:
        while len(view.drawn) >= MAX_KEPT:
            del view.drawn[next(iter(view.drawn))]
        size = BUCKET_CHARS * _num_buckets(sight)
        drawing = asyncio.create_task(work.answer(size, _json, view, sight, layer, kv_head))
        view.drawn[layer, kv_head] = drawing
    # a reader may leave while others wait for the same picture
    return await asyncio.shield(drawing)


def _json(view: View, sight: pb.Attention, layer: int | None, kv_head: int | None) -> bytes:
    answer = _picture(sight, layer, kv_head)
    answer.id, answer.prompt_tokens = view.request_id, view.prompt_tokens
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
