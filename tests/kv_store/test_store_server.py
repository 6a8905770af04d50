"""A store that cannot start says why, and leaves nothing."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import pytest

from kv_store.config import StoreConfig
from kv_store.errors import ConfigError
from kv_store.server import StoreServer


def test_whichever_thread_cannot_be_started_the_store_says_what_to_do_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    # Of these, which tests before this one left, some may end meanwhile.
    start, before = threading.Thread.start, set(threading.enumerate())
    config = StoreConfig(
        listen=f"unix:{tmp_path}/kv_store.sock",
        arena_bytes=1 << 20,
        slab_bytes=4096,
        num_trainers=1,
        runtime="process",
        kv_store_path=tmp_path / "disk",
        max_pending_builds=1,
        num_call_threads=1,
    )

    def starts_without(number: int) -> bool:
        """Return whether the server starts although that thread cannot start."""
        numbers = itertools.count()

        def fail(thread: threading.Thread) -> None:
            # One of gRPC's own, which has no name, cannot be given up half-way.
            if not thread.name.startswith("Thread-") and next(numbers) == number:
                raise RuntimeError("can't start new thread")
            start(thread)

        with monkeypatch.context() as limited:
            limited.setattr(threading.Thread, "start", fail)
            try:
                server = StoreServer(config)
            except ConfigError as error:
                told.append(str(error))
                return False
        server.close()
        return True

    for number in itertools.count():
        if starts_without(number):
            break
        assert [each.name for each in tmp_path.iterdir() if each.name.endswith(".sock")] == []
        assert set(threading.enumerate()) <= before
    assert len(told) > 8
    assert all("ulimit -u" in each for each in told)
    # Each had the folder of the one before.
    assert [each.name for each in (tmp_path / "disk").iterdir()] == ["store-0"]
