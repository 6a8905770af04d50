"""Sights of what a request attends, as JSON: each is drawn once, however many readers it has."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import numpy.typing as npt

from gateway.errors import InvalidRequest
from gateway.heavy_work import CallerWork
from gpu_worker.v1 import gpu_worker_pb2 as pb

# so that what is shared of a bucket is told to a part in ten thousand
DIGITS = 4
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
        told = {"object": "attention", "id": self._request_id, "prompt_tokens": self._prompt_tokens}
        fields = _picture(sight, layer, kv_head)
        return json.dumps(told | fields, ensure_ascii=False, separators=(",", ":")).encode()


def _check_place(sight: pb.Attention, layer: int | None, kv_head: int | None) -> None:
    layers = list(sight.layers)
    if layer is not None and layer >= sight.dense_layers and layer not in layers:
        raise InvalidRequest(f"Layer {layer} is not looked at: choose one of {layers}.", "layer")
    if kv_head is not None and kv_head >= sight.kv_heads:
        raise InvalidRequest(f"There are {sight.kv_heads} KV heads, counted from 0.", "head")


def _num_buckets(sight: pb.Attention) -> int:
    return -(-sight.context_tokens // sight.bucket_tokens)


def _picture(sight: pb.Attention, layer: int | None, kv_head: int | None) -> dict[str, Any]:
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

    return {
        "step": sight.step,
        "policy": sight.policy,
        "family": sight.family,
        "context_tokens": sight.context_tokens,
        "shared_tokens": sight.shared_tokens,
        "host_tokens": sight.host_tokens,
        "budget_tokens": sight.budget_tokens,
        "attended_tokens": round(sight.attended_tokens, 1),
        "hit_rate": round(sight.hit_rate, DIGITS),
        "bytes_moved": sight.bytes_moved,
        "layers": layers,
        "dense_layers": sight.dense_layers,
        "kv_heads": sight.kv_heads,
        "layer": layer,
        "head": kv_head,
        "bucket_tokens": sight.bucket_tokens,
        "attended": share(sight.attended),
        "on_device": share(sight.on_device),
    }
