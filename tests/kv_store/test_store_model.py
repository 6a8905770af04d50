"""After any calls, and failures between them, each slab has the holders that hold it, what is listed is what was
written, and the disk has what the store says of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from random_store import COLUMN_BYTES, LAYERS, NAMES, NUM_SLABS, OWNERS, RandomStore, bytes_of
from store_samples import TOKENS
from waiting import wait_until

from kv_store.client.ends import SequenceEnd
from kv_store.disk.folder import SESSIONS

NUM_CALLS = 150


def check_slabs(random: RandomStore) -> int:
    """Returns how many slabs are being read from the disk."""
    with random.state.lock:
        state, counts = random.state, np.zeros(NUM_SLABS, np.int32)
        own = [
            slab
            for sequence in state.sequences
            for slab in sequence.table[:, sequence.num_prefix_tokens // TOKENS :].ravel().tolist()
        ]
        assert len(set(own)) == len(own)
        sessions = [session.slabs for owner in OWNERS for _, session in state.sessions.of(owner)]
        for slabs in (
            *sessions,
            *(sequence.table.ravel() for sequence in state.sequences),
            *(index.slabs for sequence in state.sequences for index in sequence.indexes),
            *(worker.response_slabs for worker in state.workers.values()),
            *(found for name in NAMES if (found := state.prefixes.find(name)) is not None),
        ):
            np.add.at(counts, np.asarray(slabs, np.int64), 1)
        references = state.allocator.references(range(NUM_SLABS))
        assert not state.trainings
        assert state.allocator.num_free == np.count_nonzero(references == 0)
        being_read = references - counts
        assert being_read.min() >= 0
        assert being_read.max() <= 1
        assert being_read.sum() in (0, LAYERS)
        return int(being_read.sum())


def check_rows(random: RandomStore) -> None:
    with random.state.lock:
        for name in NAMES:
            if (slabs := random.state.prefixes.find(name)) is not None:
                for layer, slab in enumerate(slabs.tolist()):
                    if slab not in random.changed:
                        assert (random.bytes_at(slab) == bytes_of(name, layer)).all()


def check_disk(random: RandomStore) -> None:
    random.settle()
    columns = {file.stem for file in random.folder.path.glob("*.slabs")}
    assert random.store.stats().disk.num_bytes == len(columns) * COLUMN_BYTES
    kept = set()
    for owner in OWNERS:
        for name, session in random.state.sessions.of(owner):
            # What it holds is in the arena, or there.
            assert session.slabs.size or session.hashes == session.kept != ()
            assert {each.hex() for each in session.kept} <= columns
            kept |= {(name, session.kept[-1].hex())} if session.kept else set()
    file = random.folder.path / SESSIONS
    listed = json.loads(file.read_bytes()[32:]) if file.exists() else []
    assert {(each["name"], each["last"]) for each in listed} == kept


def check_room(random: RandomStore) -> None:
    """All that nobody runs with can be had."""
    wait_until(lambda: not check_slabs(random))
    random.store.attach("w", random.state.geometry.layout, 0)
    leased = random.store.stats().leased_bytes // random.state.slab_bytes
    num_tokens = (NUM_SLABS - leased) // LAYERS * TOKENS
    random.store.begin(random.state.epoch, "w", "all", num_tokens)
    random.store.end(random.state.epoch, "w", [SequenceEnd("all")])


@pytest.mark.parametrize("seed", range(8))
def test_whatever_is_called_every_slab_is_held_by_who_has_it(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kv_store.disk.tier.PAUSE_SECONDS", 0.0)
    # Nobody's machine fails here.
    monkeypatch.setattr("os.fdatasync", lambda descriptor: None)
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    random = RandomStore(tmp_path, seed)
    try:
        for _ in range(NUM_CALLS):
            random.step()
            check_slabs(random)
            check_rows(random)
        check_disk(random)
        check_room(random)
    except BaseException:
        print("\n".join(random.calls))
        raise
    finally:
        random.close()
