"""A store with a disk, and workers that call it at random: while their disk fails, their leases end, memory changes,
indexes are trained, and it is started again."""

from __future__ import annotations

import errno
import hashlib
import random
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from store_samples import LAYOUT, SLAB_BYTES, TOKENS, Clock

from kv_store.arena import Arena
from kv_store.client import PQParams
from kv_store.client.ends import SequenceEnd
from kv_store.disk.folder import TierFolder, take_folder
from kv_store.disk.tier import DiskTier
from kv_store.errors import KVStoreError, TrainingFailed
from kv_store.gather import GatherItem, RowReader
from kv_store.index import IterationBound
from kv_store.indexes import BuildRequest, IndexBuilder
from kv_store.sequences import Sequence
from kv_store.state import StoreState
from kv_store.store import Store
from kv_store.trainers import TrainerPool, TrainOutcome, TrainTask

NUM_SLABS, LAYERS = 48, LAYOUT.num_layers
COLUMN_BYTES = 4096 + LAYERS * SLAB_BYTES
WORKERS, OWNERS = ("v", "w"), ("me", "them")
SESSIONS = tuple(f"{name} of {owner}" for name in "stu" for owner in OWNERS)
# A letter a slab: some begin alike.
PROMPTS = ("abcdefgh", "abcxyz", "abq", "klmnopqrstu", "klmz", "v")


def names_of(owner: str, words: str) -> tuple[bytes, ...]:
    begins = (words[: end + 1] for end in range(len(words)))
    return tuple(hashlib.sha256(f"{owner} {begin}".encode()).digest() for begin in begins)


NAMES = sorted({name for owner in OWNERS for words in PROMPTS for name in names_of(owner, words)})


def bytes_of(name: bytes, layer: int) -> npt.NDArray[np.uint8]:
    """Return the contents of a slab of this name."""
    return np.random.default_rng([layer, *name]).integers(0, 256, SLAB_BYTES, np.uint8)


class ActsFirst(Future[TrainOutcome]):
    """A training during which something else happens."""

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__()
        self._act = act

    def result(self, timeout: float | None = None) -> TrainOutcome:
        self._act()
        if self.cancelled():
            raise CancelledError
        if not self.done():
            self.set_result(TrainOutcome(0.1, 1))
        return super().result(timeout)


class Trainers(TrainerPool):
    """act: happens while each head is trained."""

    def __init__(self) -> None:
        self.act: Callable[[], None] = _nothing

    def submit(self, task: TrainTask) -> Future[TrainOutcome]:
        return ActsFirst(self.act)

    def close(self) -> None:
        """Nothing runs."""


class ShakyFolder(TierFolder):
    """share: of the disk's calls that fail."""

    def __init__(self, folder: TierFolder, seed: int) -> None:
        super().__init__(folder.path, folder.descriptor)
        self._draw = random.Random(seed)
        self.share = 0.0

    def _strike(self, code: int) -> None:
        if self._draw.random() < self.share:
            raise OSError(code, "on purpose")

    def write(self, name: str, parts: Any) -> None:
        self._strike(errno.ENOSPC)
        super().write(name, parts)

    def open(self, name: str) -> Any:
        self._strike(errno.EIO)
        return super().open(name)

    def remove(self, name: str) -> None:
        self._strike(errno.EIO)
        super().remove(name)


@dataclass(slots=True)
class Prompt:
    """num_written: slabs of each layer that are."""

    owner: str
    words: str
    num_written: int

    @property
    def names(self) -> tuple[bytes, ...]:
        return names_of(self.owner, self.words)


class RandomStore:
    """prompts: of the sequences that are open, by worker and id. changed: slabs in which memory did. calls: what was
    called, and how it ended."""

    def __init__(self, path: Path, seed: int) -> None:
        self.draw = random.Random(seed)
        self.clock = Clock()
        self.prompts: dict[tuple[str, str], Prompt] = {}
        self.changed: set[int] = set()
        self.calls: list[str] = []
        self._path = path
        self._start()

    def _start(self) -> None:
        self.state = StoreState(Arena(NUM_SLABS * SLAB_BYTES), SLAB_BYTES, 10.0, self.clock)
        self.folder = ShakyFolder(take_folder(self._path, 0.0), self.draw.randrange(1 << 30))
        self.tier = DiskTier(self.state, self.folder, self.draw.choice((6, 12, 40)) * COLUMN_BYTES)
        self.store, self.trainers = Store(self.state, self.tier), Trainers()
        self.store.attach("w", LAYOUT, 0)

    def close(self) -> None:
        self.folder.share = 0.0
        self.tier.close()
        self.state.close()
        self.state.arena.close()

    def step(self) -> None:
        often = [self.begin] * 8 + [self.write] * 6 + [self.seal] * 5 + [self.end] * 6
        sometimes = [self.reserve, self.build, self.read] * 2
        seldom = [self.pin, self.drop, self.pass_time, self.attach, self.verify, self.change, self.settle]
        call = self.draw.choice([*often, *sometimes, *seldom, self.shake, self.restart])
        self.calls.append(call.__name__)
        try:
            call()
        except KVStoreError as error:
            self.calls[-1] += f": {error}"
        for key in [key for key in self.prompts if self.state.sequences.find(*key) is None]:
            del self.prompts[key]

    def bytes_at(self, slab: int) -> npt.NDArray[np.uint8]:
        return self.state.arena.data[slab * SLAB_BYTES : (slab + 1) * SLAB_BYTES]

    def some(self) -> tuple[Sequence, Prompt]:
        """Raises KVStoreError where there is none."""
        if not self.prompts:
            raise KVStoreError("no sequence is open")
        key = self.draw.choice(sorted(self.prompts))
        return self.state.sequences.get(*key), self.prompts[key]

    def begin(self) -> None:
        key = (self.draw.choice(WORKERS), self.draw.choice("abcd"))
        prompt = self.prompts.get(key, Prompt(self.draw.choice(OWNERS), self.draw.choice(PROMPTS), 0))
        num_tokens = self.draw.randrange((len(prompt.words) + 3) * TOKENS)
        num_shared, _ = self.store.begin(
            self.state.epoch, *key, num_tokens, prompt.names, self.draw.random() < 0.3, prompt.owner
        )
        if self.state.sequences.find(*key) is not None:
            prompt.num_written = max(prompt.num_written, num_shared // TOKENS)
            self.prompts[key] = prompt

    def reserve(self) -> None:
        sequence, _ = self.some()
        num_tokens = self.draw.randrange((sequence.slabs_per_layer + 4) * TOKENS)
        self.store.reserve(self.state.epoch, sequence.worker_id, sequence.sequence_id, num_tokens)

    def write(self) -> None:
        """All that is not written yet; behind the prompt it is of no matter what."""
        sequence, prompt = self.some()
        names = prompt.names
        for place in range(prompt.num_written, sequence.slabs_per_layer):
            for layer, slab in enumerate(sequence.table[:, place].tolist()):
                self.bytes_at(slab)[:] = bytes_of(names[place % len(names)], layer)
                self.changed.discard(slab)
        prompt.num_written = sequence.slabs_per_layer

    def seal(self) -> None:
        sequence, prompt = self.some()
        self.store.seal(
            self.state.epoch,
            sequence.worker_id,
            sequence.sequence_id,
            self.draw.randrange(prompt.num_written * TOKENS + 1),
            *self.draw.choice(((0, 1), (1, LAYERS), (0, LAYERS), (0, LAYERS))),
            prompt.names[: sequence.slabs_per_layer] if self.draw.random() < 0.6 else (),
            self._session(prompt) if self.draw.random() < 0.3 else "",
        )

    def _session(self, prompt: Prompt) -> str:
        return self.draw.choice([name for name in SESSIONS if name.endswith(f"of {prompt.owner}")])

    def end(self) -> None:
        ends, worker = [], self.draw.choice(WORKERS)
        for (of, name), prompt in self.prompts.items():
            if of == worker and self.draw.random() < 0.4:
                sequence = self.state.sequences.get(of, name)
                # Some ask for more than they have.
                num_tokens = self.draw.choice((0, prompt.num_written, sequence.slabs_per_layer + 1)) * TOKENS
                session = self._session(prompt) if self.draw.random() < 0.5 else ""
                hashes, keeps = prompt.names[: sequence.slabs_per_layer], self.draw.random() < 0.2
                ends.append(SequenceEnd(name, num_tokens, hashes, session, keeps_prefix=keeps))
        try:
            self.store.end(self.state.epoch, worker, ends)
        finally:
            for each in ends:
                left = self.state.sequences.find(worker, each.sequence_id)
                if left is not None and (found := self.prompts.get((worker, each.sequence_id))) is not None:
                    found.num_written = min(found.num_written, left.slabs_per_layer)

    def build(self) -> None:
        sequence, _ = self.some()
        self.trainers.act = self.draw.choice((_nothing, self.end, self.attach, _fail))
        builder = IndexBuilder(self.state, self.trainers, IterationBound(4, 1), 0)
        num_tokens = self.draw.randrange(int(sequence.sealed[0]) + 2)
        request = BuildRequest(sequence.sequence_id, 0, 0, num_tokens, PQParams(2, 2), 0, 0.0)
        builder.build(self.state.epoch, sequence.worker_id, request)

    def read(self) -> None:
        sequence, prompt = self.some()
        layer = self.draw.randrange(LAYERS)
        if num_tokens := min(int(sequence.sealed[layer]), len(prompt.words) * TOKENS):
            position = self.draw.randrange(num_tokens)
            place, within = divmod(position, TOKENS)
            wanted = GatherItem(sequence.sequence_id, layer, 0, np.array([position], np.uint64))
            [row] = RowReader(self.state).chunks(self.state.epoch, sequence.worker_id, [wanted])
            if int(sequence.table[layer, place]) not in self.changed:
                written = bytes_of(prompt.names[place], layer)[within * LAYOUT.row_format.row_bytes :]
                assert row == written[: LAYOUT.row_format.row_bytes].tobytes()

    def pin(self) -> None:
        is_pinned = self.draw.random() < 0.5
        self.store.sessions.pin(self.state.epoch, "w", self.draw.choice(SESSIONS), is_pinned)

    def drop(self) -> None:
        self.store.sessions.drop(self.state.epoch, "w", self.draw.choice(SESSIONS))

    def pass_time(self) -> None:
        self.clock.now += self.draw.choice((1.0, 6.0, 11.0, 700.0))
        self.store.reap()

    def attach(self) -> None:
        self.store.attach(self.draw.choice(WORKERS), LAYOUT, self.draw.choice((0, 0, 64)))

    def verify(self) -> None:
        sequence, _ = self.some()
        self.store.verify(self.state.epoch, sequence.worker_id, sequence.sequence_id)

    def change(self) -> None:
        """A bit of what is listed, once it has its checksum."""
        with self.state.lock:
            self.state.checksums.settle()
            found = [slabs for name in NAMES if (slabs := self.state.prefixes.find(name)) is not None]
            if found:
                slab = int(self.draw.choice(self.draw.choice(found)))
                self.bytes_at(slab)[self.draw.randrange(SLAB_BYTES)] ^= 16
                self.changed.add(slab)

    def shake(self) -> None:
        self.folder.share = self.draw.choice((0.0, 0.1))

    def settle(self) -> None:
        self.folder.share = 0.0
        self.store.settle()

    def restart(self) -> None:
        if self.draw.random() < 0.3:
            self.close()
            self.prompts.clear()
            self.changed.clear()
            self._start()


def _nothing() -> None:
    pass


def _fail() -> None:
    raise TrainingFailed("on purpose")
