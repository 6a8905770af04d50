"""A store with a disk tier that the tests write prompts to, restart, and ask what it knows."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_samples import LAYOUT, SLAB_BYTES, TOKENS, chain, random_rows
from waiting import PATIENCE, wait_until

from kv_store.client import Layout, PrefixLoading, RowsWanted, StoreClient
from kv_store.disk.folder import TierFolder
from kv_store.local import LocalStore

NUM_SLABS = 4
COLUMN_BYTES = 4096 + LAYOUT.num_layers * SLAB_BYTES
ROWS = [random_rows(LAYOUT, NUM_SLABS * TOKENS, seed) for seed in range(LAYOUT.num_layers)]


class Tier:
    """A store with a disk tier, and its client, which attaches again after a restart."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.path = path
        self.store = LocalStore(64 * SLAB_BYTES, slab_bytes=SLAB_BYTES, disk=path, **options)
        self.client = self.attach()

    def attach(self, layout: Layout = LAYOUT) -> StoreClient:
        return StoreClient.connect(
            self.store.target, layout, worker_id="w", max_gather_rows=512, timeout_seconds=PATIENCE
        )

    def write(self, name: str, session: str = "", num_slabs: int = NUM_SLABS, owner: str = "me") -> None:
        """A prompt of this name, known from then on, and on the disk where that may be."""
        self.seal(name, name, session, num_slabs, owner)
        self.store.server.store.settle()

    def seal(
        self, sequence_id: str, name: str, session: str = "", num_slabs: int = NUM_SLABS, owner: str = "me"
    ) -> None:
        """A prompt of this name that comes and goes, known from then on."""
        num_tokens, hashes = num_slabs * TOKENS, chain(num_slabs, name)
        num_shared = self.begin(sequence_id, num_tokens, hashes, owner)
        for layer, rows in enumerate(ROWS):
            if num_shared < num_tokens:
                self.client.put(sequence_id, layer, num_shared, rows[:, num_shared:num_tokens])
        self.client.seal(sequence_id, num_tokens, 0, None, hashes, session, f"label of {session}")
        self.client.end(sequence_id)
        self.client.stats()

    def begin(self, name: str, num_tokens: int, hashes: list[bytes], owner: str = "me") -> int:
        """Tokens that are known once nothing is on its way any more."""
        found: list[int] = []

        def has_begun() -> bool:
            with contextlib.suppress(PrefixLoading):
                found.append(self.client.begin(name, num_tokens, hashes, owner=owner).num_shared)
            return bool(found)

        wait_until(has_begun)
        return found[0]

    def restart(self, changes: Callable[[], None] = lambda: None) -> None:
        self.store.server.close()
        changes()
        self.store.restart()
        self.client.reattach()

    def num_known(self, name: str, num_slabs: int = NUM_SLABS) -> int:
        """Slabs that a prompt finds, which have the right rows."""
        num_shared = self.begin("look", num_slabs * TOKENS, chain(num_slabs, name))
        if num_shared:
            assert self.client.verify("look").result(PATIENCE) == 0
            for layer, rows in enumerate(ROWS):
                got = self.client.gather(layer, [RowsWanted("look", 1, np.arange(num_shared))])
                assert (got == rows[1, :num_shared]).all()
        self.client.end("look")
        self.client.stats()
        return num_shared // TOKENS

    def files(self) -> list[Path]:
        """Return the files of slabs."""
        return sorted(self.path.glob("store-0/*.slabs"))

    def kept(self, *names: str) -> str:
        """Name the prompts whose slabs all have files; of the others, how many do."""
        found = {file.stem for file in self.files()}
        counts = {name: sum(value.hex() in found for value in chain(NUM_SLABS, name)) for name in names}
        told = [name if count == NUM_SLABS else f"{name}:{count}" for name, count in counts.items() if count]
        return " ".join(told)


def fail_once(patch: pytest.MonkeyPatch, code: int) -> list[OSError]:
    """Let the disk's next removal fail. Returns the error until it has been raised."""
    remove, errors = TierFolder.remove, [OSError(code, "it fails")]

    def fail(folder: TierFolder, name: str) -> None:
        if errors:
            raise errors.pop()
        remove(folder, name)

    patch.setattr(TierFolder, "remove", fail)
    return errors


def hold_writes(patch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Let each write to the disk wait. Returns events: a write has begun, and writes may go on."""
    begun, goes_on, write = threading.Event(), threading.Event(), TierFolder.write

    def wait(folder: TierFolder, name: str, parts: Sequence[bytes | memoryview]) -> None:
        begun.set()
        assert goes_on.wait(PATIENCE)
        write(folder, name, parts)

    patch.setattr(TierFolder, "write", wait)
    return begun, goes_on


@contextlib.contextmanager
def running(path: Path, **options: Any) -> Iterator[Tier]:
    tier = Tier(path, **options)
    try:
        yield tier
    finally:
        tier.client.close()
        tier.store.close()


def flipped(place: int) -> Callable[[Path], None]:
    """A change of one bit of a file."""

    def flip(file: Path) -> None:
        data = bytearray(file.read_bytes())
        data[place] ^= 4
        file.write_bytes(data)

    return flip
