"""The stores of replicas tell where other stores reach them, as long as they answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import ray.exceptions
from waiting import PATIENCE

from carrel.cluster.peering import Peering
from kv_store.actor import StoreActor
from kv_store.config import StoreConfig
from kv_store.errors import ConfigError

TOKEN = "a-secret-of-some-length"


@dataclass
class Method:
    """As Ray gives an actor's."""

    remote: Callable[[], Awaitable[int]]


@dataclass
class FakeStore:
    peer_port: Method


async def answers() -> int:
    return 7001


async def is_gone() -> int:
    raise ray.exceptions.ActorDiedError


async def hangs() -> int:
    await asyncio.sleep(600.0)
    return 7001


@pytest.mark.parametrize(
    ("method", "address"),
    [(answers, "10.1.2.3:7001"), (is_gone, ""), (hangs, "")],
    ids=["answers", "is gone", "hangs"],
)
async def test_a_store_that_does_not_answer_is_nowhere(
    method: Callable[[], Awaitable[int]], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "10.1.2.3")
    asked = Peering(TOKEN).address_of(FakeStore(Method(method)), 0.05 if method is hangs else PATIENCE)
    assert await asyncio.wait_for(asked, PATIENCE) == address


def store_config(folder: Path, peer_listen: str) -> StoreConfig:
    return StoreConfig(
        f"unix:{folder}/s", 1 << 20, 1 << 16, num_trainers=1, peer_listen=peer_listen, peer_token=TOKEN
    )


def test_a_stores_actor_tells_its_port(tmp_path: Path) -> None:
    store = StoreActor(store_config(tmp_path, "127.0.0.1:0"))
    try:
        assert store.peer_port() > 0
    finally:
        store.stop()


def test_a_stores_actor_without_other_stores_has_no_port(tmp_path: Path) -> None:
    store = StoreActor(store_config(tmp_path, ""))
    try:
        assert store.peer_port() == 0
    finally:
        store.stop()


def test_an_address_that_is_not_this_nodes_is_told_without_the_token(tmp_path: Path) -> None:
    store = StoreActor(store_config(tmp_path, "192.0.2.200:0"))
    with pytest.raises(ConfigError, match=r"192\.0\.2\.200:0.*cannot be used") as raised:
        store.peer_port()
    assert TOKEN not in str(raised.value)
    store.stop()
