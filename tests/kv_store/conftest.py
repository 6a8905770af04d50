"""Stores and clients for the tests, small enough to fill."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from store_samples import LAYOUT, SLAB_BYTES, Clock
from tiers import Tier, running
from waiting import PATIENCE

from kv_store.arena import Arena
from kv_store.client import Layout, StoreClient
from kv_store.local import LocalStore
from kv_store.state import StoreState
from kv_store.store import Store


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def state(clock: Clock) -> Iterator[StoreState]:
    arena = Arena(64 * SLAB_BYTES)
    yield StoreState(arena, SLAB_BYTES, 10.0, clock)
    arena.close()


@pytest.fixture
def store(state: StoreState) -> Store:
    """A store with the worker "w"."""
    made = Store(state)
    made.attach("w", LAYOUT, 0)
    return made


@pytest.fixture
def local_store() -> Iterator[LocalStore]:
    with LocalStore(256 * SLAB_BYTES, slab_bytes=SLAB_BYTES) as running:
        yield running


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[Tier]:
    with running(tmp_path / "disk") as started:
        yield started


@pytest.fixture
def connect(local_store: LocalStore) -> Iterator[Callable[..., StoreClient]]:
    """Make clients that are closed at the end."""
    clients = []

    def make(worker_id: str = "w", transport: str = "shm", layout: Layout = LAYOUT) -> StoreClient:
        client = StoreClient.connect(
            local_store.target,
            layout,
            worker_id=worker_id,
            transport=transport,
            max_gather_rows=512,
            timeout_seconds=PATIENCE,
        )
        clients.append(client)
        return client

    yield make
    for client in clients:
        client.close()
