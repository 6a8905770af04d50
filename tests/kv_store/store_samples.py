"""Layouts, rows and a clock that the store's tests share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np

from kv_store.client import Layout, RowFormat, StoreClient
from kv_store.client.ends import SequenceEnd
from kv_store.store import Store

SLAB_BYTES = 4096
# 2 heads x 64 bytes a token: 32 tokens a slab.
LAYOUT = Layout(num_layers=2, num_kv_heads=2, row_format=RowFormat(16, "bf16"))
TOKENS = 32


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class ActsAtExit:
    """A lock that does something as soon as it was let go of so many times."""

    def __init__(self, lock: Any, act: Callable[[], object], num_exits: int = 1) -> None:
        self._lock = lock
        self._act = act
        self._left = num_exits

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *exc_info: object) -> None:
        self._lock.release()
        self._left -= 1
        if self._left == 0:
            self._act()


def random_rows(layout: Layout, num_tokens: int, seed: int = 0) -> np.ndarray:
    """Finite rows uint8 [num_kv_heads, num_tokens, row_bytes] of the layout's type."""
    shape = (layout.num_kv_heads, num_tokens, layout.row_format.row_elements)
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    if layout.row_format.element == "fp32":
        return values.view(np.uint8)
    if layout.row_format.element == "fp16":
        return values.astype(np.float16).view(np.uint8)
    return np.ascontiguousarray(values.view(np.uint16)[..., 1::2]).view(np.uint8)


def keys_of(layout: Layout, rows: np.ndarray) -> np.ndarray:
    """The K half of rows as float32 [num_kv_heads, num_tokens, head_dim], written independently of the store."""
    half = np.ascontiguousarray(rows[..., : layout.row_format.key_bytes])
    if layout.row_format.element == "fp32":
        return half.view(np.float32)
    if layout.row_format.element == "fp16":
        return half.view(np.float16).astype(np.float32)
    wide = np.zeros((*half.shape[:-1], layout.row_format.head_dim, 2), np.uint16)
    wide[..., 1] = half.view(np.uint16)
    return wide.view(np.float32)[..., 0]


def chain(num_slabs: int, salt: str = "") -> list[bytes]:
    hashes, last = [], salt.encode()
    for i in range(num_slabs):
        last = hashlib.sha256(last + bytes([i])).digest()
        hashes.append(last)
    return hashes


def open_with(
    store: Store, epoch: int, sequence_id: str, num_tokens: int, worker_id: str = "w"
) -> np.ndarray:
    return store.begin(epoch, worker_id, sequence_id, num_tokens)[1]


def end(store: Store, epoch: int, sequence_id: str, worker_id: str = "w", **options: Any) -> None:
    store.end(epoch, worker_id, [SequenceEnd(sequence_id, **options)])


def known(store: Store, epoch: int, hashes: list[bytes]) -> int:
    """Tokens of this prefix that a sequence would share."""
    num_tokens, _ = store.begin(epoch, "w", "look", 0, hashes)
    end(store, epoch, "look")
    return num_tokens


def filled(client: StoreClient, num_tokens: int, name: str = "a", seed: int = 0) -> np.ndarray:
    """Begin a sequence and seal random rows, the same in each of its layers. Returns them."""
    rows = random_rows(client.layout, num_tokens, seed)
    client.begin(name, num_tokens)
    for layer in range(client.layout.num_layers):
        client.put(name, layer, 0, rows)
    client.seal(name, num_tokens)
    return rows
