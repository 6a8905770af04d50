"""What a store finds again on its disk after a restart, what it does not, and what a disk that fails costs."""

import contextlib
import errno
import os
import resource
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from store_samples import LAYOUT, SLAB_BYTES, TOKENS, chain
from tiers import COLUMN_BYTES, NUM_SLABS, Tier, running
from waiting import PATIENCE, wait_until

from kv_store.client import Layout, PrefixLoading, RowFormat
from kv_store.disk.catalog import UNUSED_SECONDS
from kv_store.disk.files import TierFiles
from kv_store.disk.folder import TierFolder, take_folder
from kv_store.errors import ConfigError
from kv_store.local import LocalStore


def test_prefixes_sessions_and_pins_survive_the_store(tier: Tier) -> None:
    tier.write("a", "doc")
    tier.write("b")
    tier.client.pin_session("doc", True)
    tier.store.server.store.settle()
    before = tier.client.list_sessions("me")
    tier.restart()
    assert tier.client.list_sessions("me") == before
    assert before[0].is_pinned
    base = tier.client.stats().reserved_bytes
    assert tier.num_known("a") == NUM_SLABS
    assert tier.client.stats().reserved_bytes == base + NUM_SLABS * LAYOUT.num_layers * SLAB_BYTES
    assert tier.num_known("b", 2) == 2
    # Another key's names are others.
    assert tier.num_known("c") == 0
    stats = tier.client.stats().disk
    num_hits = (NUM_SLABS + 2) * TOKENS
    assert (stats.lookup_tokens, stats.hit_tokens) == (num_hits + NUM_SLABS * TOKENS, num_hits)
    assert (stats.num_bytes, stats.num_corrupt, stats.num_errors) == (2 * NUM_SLABS * COLUMN_BYTES, 0, 0)
    assert tier.path.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in tier.path.glob("store-0/*")} == {0o600}


def test_a_dropped_session_leaves_nothing_on_the_disk(tier: Tier) -> None:
    tier.write("a", "doc", 2)
    tier.write("a", "other", 1)
    # What follows on it.
    tier.write("a")
    tier.restart()
    tier.client.drop_session("doc")
    tier.store.server.store.settle()
    assert (len(tier.files("slabs")), len(tier.files("session"))) == (1, 1)
    tier.restart()
    assert [each.session_id for each in tier.client.list_sessions("me")] == ["other"]
    assert tier.num_known("a") == 1


def test_what_the_arena_has_no_room_for_is_found_on_the_disk(tier: Tier) -> None:
    tier.write("a", "doc")
    tier.client.begin("all", 30 * TOKENS)
    tier.client.end("all")
    [doc] = tier.client.list_sessions("me")
    assert doc.num_tokens == NUM_SLABS * TOKENS
    assert tier.num_known("a") == NUM_SLABS
    # Where there is no room either, the prompt is not kept waiting.
    tier.client.begin("all", 32 * TOKENS)
    hashes = chain(NUM_SLABS, "a")
    assert tier.begin("b", 0, hashes) == 0


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-SLAB_BYTES])


def _flip(place: int) -> Callable[[Path], None]:
    def flip(file: Path) -> None:
        data = bytearray(file.read_bytes())
        data[place] ^= 4
        file.write_bytes(data)

    return flip


def _swap(file: Path) -> None:
    """Slabs of another prompt under this one's name."""
    other = next(each for each in file.parent.glob("*.slabs") if each != file)
    shutil.copy(other, file)


def _link(file: Path) -> None:
    moved = file.rename(file.with_suffix(".moved"))
    file.symlink_to(moved)


@pytest.mark.parametrize(
    "damage",
    [
        _cut,
        _flip(20),
        _flip(100),
        _flip(4096 + 5000),
        _swap,
        Path.unlink,
        _link,
        lambda file: file.write_bytes(b""),
    ],
    ids=["torn", "layout", "header", "slab", "swapped", "gone", "link", "empty"],
)
def test_a_file_that_is_not_what_was_written_costs_what_is_behind_it(
    tier: Tier, damage: Callable[[Path], None]
) -> None:
    tier.write("a", "doc")
    third = tier.path / "store-0" / f"{chain(NUM_SLABS, 'a')[2].hex()}.slabs"
    tier.restart(lambda: damage(third))
    assert tier.num_known("a") == 2
    # It is computed and kept again.
    tier.write("a", "doc")
    tier.restart()
    assert tier.num_known("a") == NUM_SLABS
    assert len(tier.client.list_sessions("me")) == 1


def test_what_cannot_be_removed_costs_itself_alone(tier: Tier) -> None:
    tier.write("a", "doc")
    folder = tier.path / "store-0" / f"{chain(1, 'folder')[0].hex()}.slabs"
    tier.restart(lambda: (folder / "in it").mkdir(parents=True))
    assert tier.num_known("a") == NUM_SLABS
    assert [each.session_id for each in tier.client.list_sessions("me")] == ["doc"]
    stats = tier.client.stats().disk
    assert (stats.num_corrupt, stats.num_errors) == (1, 1)


def test_a_session_that_is_not_what_was_written_is_forgotten_alone(tier: Tier) -> None:
    tier.write("a", "doc")
    tier.write("b", "other")
    tier.restart(lambda: _flip(200)(tier.files("session")[0]))
    assert len(tier.client.list_sessions("me")) == 1
    assert tier.client.stats().disk.num_corrupt == 1
    assert (tier.num_known("a"), tier.num_known("b")) == (NUM_SLABS, NUM_SLABS)


def test_a_disk_that_fails_costs_the_tier_only(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_store.disk.write_queue.PAUSE_SECONDS", 0.0)
    tier.write("a", "doc")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (COLUMN_BYTES // 2, hard))
    try:
        tier.write("b", "lost")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert tier.num_known("b") == NUM_SLABS
    stats = tier.client.stats().disk
    assert stats.num_errors == 1
    assert stats.num_skipped > 0
    # Nothing half-written is left, and what was there is.
    assert not list(tier.path.glob("store-0/*.new"))
    tier.restart()
    assert [each.session_id for each in tier.client.list_sessions("me")] == ["doc"]
    assert (tier.num_known("a"), tier.num_known("b")) == (NUM_SLABS, 0)
    # It is written to again as soon as it may be.
    tier.write("b", "kept")
    tier.restart()
    assert tier.num_known("b") == NUM_SLABS


def test_a_disk_that_was_full_is_used_again_as_far_as_it_has_room(
    tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kv_store.disk.write_queue.PAUSE_SECONDS", 0.0)
    tier.write("a")
    with monkeypatch.context() as full:
        full.setattr(TierFolder, "write", _refuse)
        tier.write("b")
    # It is not asked at once.
    tier.write("c")
    assert tier.client.stats().disk.num_bytes == NUM_SLABS * COLUMN_BYTES
    monkeypatch.setattr("kv_store.disk.tier.LOOK_SECONDS", 0.0)
    for free, columns in ((0, NUM_SLABS), (2 * COLUMN_BYTES, NUM_SLABS + 2), (1 << 40, 2 * NUM_SLABS + 2)):
        monkeypatch.setattr(TierFolder, "free_bytes", lambda folder, free=free: free)
        tier.write(f"with {free}")
        assert tier.client.stats().disk.num_bytes == columns * COLUMN_BYTES


def _refuse(folder: TierFolder, name: bytes, kind: str, parts: Any) -> None:
    raise OSError(errno.ENOSPC, "full")


def test_a_prompt_waits_for_a_disk_that_hangs_once_and_so_long(
    tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, read_column = threading.Event(), TierFiles.read_column

    def hang(files: TierFiles, name: bytes, slabs: Any) -> None:
        assert goes_on.wait(PATIENCE)
        read_column(files, name, slabs)

    monkeypatch.setattr(TierFiles, "read_column", hang)
    monkeypatch.setattr("kv_store.disk.loader.WAIT_SECONDS", 0.05)
    tier.write("a")
    tier.write("b")
    tier.restart()
    with pytest.raises(PrefixLoading):
        tier.client.begin("first", 0, chain(NUM_SLABS, "a"))
    assert tier.begin("first", 0, chain(NUM_SLABS, "a")) == 0
    # Another is not kept waiting at all.
    assert tier.client.begin("second", 0, chain(NUM_SLABS, "b")).num_shared == 0
    goes_on.set()
    monkeypatch.setattr("kv_store.disk.loader.WAIT_SECONDS", PATIENCE)
    wait_until(lambda: tier.num_known("b") == NUM_SLABS)


def test_who_reads_much_of_the_disk_keeps_others_waiting_for_one_prompt_at_most(
    tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, read_column, read = threading.Event(), TierFiles.read_column, list[bytes]()

    def note(files: TierFiles, name: bytes, slabs: Any) -> None:
        assert goes_on.wait(PATIENCE)
        read.append(name)
        read_column(files, name, slabs)

    monkeypatch.setattr(TierFiles, "read_column", note)
    names = ("a1", "a2", "a3", "b1")
    for name in names:
        tier.write(name, owner=name[0], num_slabs=1)
    tier.restart()
    for name in names:
        with pytest.raises(PrefixLoading):
            tier.client.begin(name, 0, chain(1, name), owner=name[0])
    goes_on.set()
    wait_until(lambda: len(read) == 4)
    assert chain(1, "b1")[0] in read[:3]


def test_faults_of_the_disk_cost_what_was_to_be_kept(tmp_path: Path) -> None:
    with running(tmp_path, faults="disk.write:alloc:1") as tier:
        tier.write("a", "doc")
        assert tier.num_known("a") == NUM_SLABS
        assert (tier.client.stats().disk.num_errors, tier.client.stats().disk.num_bytes) == (1, 0)
    with running(tmp_path, faults="disk.write:partial:1") as tier:
        tier.write("a", "doc")
        tier.restart()
        assert tier.num_known("a") == 0
        assert tier.client.stats().disk.num_corrupt == NUM_SLABS + 1
    with running(tmp_path, faults="disk.read:flip:1") as tier:
        tier.write("a", "doc")
        tier.restart()
        assert tier.num_known("a") == 0


def test_beyond_its_size_the_oldest_goes_but_not_what_is_pinned(tmp_path: Path) -> None:
    with running(tmp_path, disk_bytes=10 * COLUMN_BYTES) as tier:
        tier.write("a", "pinned")
        tier.client.pin_session("pinned", True)
        tier.write("b", "oldest")
        # Half of it finds room, which a session may take.
        tier.write("c")
        assert tier.client.stats().disk.num_skipped > 0
        tier.write("d", "newest")
        assert tier.client.stats().disk.num_bytes <= 10 * COLUMN_BYTES
        tier.restart()
        assert {each.session_id for each in tier.client.list_sessions("me")} == {"pinned", "newest"}
        assert (tier.num_known("a"), tier.num_known("d")) == (NUM_SLABS, NUM_SLABS)
        assert len(tier.files("session")) == 2


@pytest.mark.parametrize("in_sessions", [False, True])
def test_who_floods_a_disk_takes_its_own_room_there_also_after_a_restart(
    tmp_path: Path, in_sessions: bool
) -> None:
    with running(tmp_path, disk_bytes=16 * COLUMN_BYTES) as tier:
        tier.write("b1", owner="b")
        tier.write("b2", "of b", owner="b")
        for number in range(4):
            tier.write(f"a{number}", f"session {number}" if in_sessions else "", owner="a")
        assert tier.kept("b1", "b2", "a0", "a1", "a2", "a3") == "b1 b2 a2 a3"
        tier.restart()
        for number in range(4, 7):
            tier.write(f"a{number}", f"session {number}" if in_sessions else "", owner="a")
        assert tier.kept("b1", "b2", "a2", "a3", "a4", "a5", "a6") == "b1 b2 a5 a6"
        # A third one takes of both.
        for number in range(2):
            tier.write(f"c{number}", owner="c")
        assert len(tier.kept("b1", "b2").split()) == 2
        assert tier.kept("c0", "c1").startswith("c0")
        assert len(tier.files("slabs")) == 16


def test_what_nobody_used_for_a_day_goes_from_the_disk_first_whoevers_it_is(tmp_path: Path) -> None:
    with running(tmp_path, disk_bytes=16 * COLUMN_BYTES) as tier:
        tier.write("b1", owner="b")
        tier.write("b2", owner="b")
        tier.write("a1", owner="a")

        def grow_old() -> None:
            # Only what comes first: it is used whenever what follows is.
            for value in (*chain(NUM_SLABS, "b1")[:1], *chain(NUM_SLABS, "b2")):
                file = tier.path / "store-0" / f"{value.hex()}.slabs"
                os.utime(file, (time.time() - UNUSED_SECONDS - 60,) * 2)

        tier.restart(grow_old)
        for number in range(2, 4):
            tier.write(f"a{number}", owner="a")
        assert tier.kept("b1", "b2", "a1", "a2", "a3") == "b1 a1 a2 a3"


def test_another_layout_begins_with_an_empty_tier(tier: Tier) -> None:
    tier.write("a", "doc")
    tier.client.close()
    tier.client = tier.attach(Layout(num_layers=3, num_kv_heads=2, row_format=RowFormat(16)))
    assert tier.client.stats().disk.num_bytes == 0
    assert not tier.files("slabs")
    assert not tier.client.list_sessions("me")


def test_stores_of_one_path_have_a_folder_each_and_a_path_that_cannot_be_used_is_refused(
    tier: Tier, tmp_path: Path
) -> None:
    tier.write("a")
    for seconds, name in ((0.0, "store-1"), (PATIENCE, "store-1")):
        second = take_folder(tier.path, seconds)
        assert (second.path.name, list(second.files())) == (name, [])
        second.close()
    # One that ends leaves its own to who waits.
    closing = threading.Timer(0.2, tier.store.server.close)
    with contextlib.closing(take_folder(tier.path, 0.0)):
        closing.start()
        with contextlib.closing(take_folder(tier.path, PATIENCE)) as freed:
            assert freed.path.name == "store-0"
    closing.join()
    file = tmp_path / "file"
    file.touch()
    for path in (file, Path("/proc/none")):
        with pytest.raises(ConfigError, match="--kv-store-path"):
            LocalStore(SLAB_BYTES, slab_bytes=SLAB_BYTES, disk=path)
