"""Tests of a restarted store: prefixes and sessions that it finds again on its disk."""

import contextlib
import errno
import os
import resource
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from store_samples import LAYOUT, SLAB_BYTES, TOKENS, chain
from tiers import COLUMN_BYTES, NUM_SLABS, Tier, flipped, running
from waiting import PATIENCE, wait_until

from kv_store.client import Layout, PrefixLoading, RowFormat
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
    assert len(tier.files()) == 1
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
        flipped(20),
        flipped(100),
        flipped(4096 + 5000),
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
    assert (stats.num_corrupt, stats.num_errors) == (0, 1)


def test_a_disk_that_fails_costs_the_tier_only(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_store.disk.tier.PAUSE_SECONDS", 0.0)
    tier.write("a", "doc")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (COLUMN_BYTES // 2, hard))
    try:
        tier.write("b", "lost")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert tier.num_known("b") == NUM_SLABS
    stats = tier.client.stats().disk
    assert stats.num_errors > 0
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


def test_a_full_disk_keeps_what_it_has_and_takes_more_once_it_has_space(
    tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kv_store.disk.tier.PAUSE_SECONDS", 0.0)
    tier.write("a")
    with monkeypatch.context() as full:
        full.setattr(TierFolder, "write", _refuse)
        tier.write("b", "lost")
        assert tier.num_known("b") == NUM_SLABS
    assert tier.kept("a", "b") == "a"
    assert tier.client.stats().disk.num_errors > 0
    tier.write("c")
    assert tier.kept("a", "c") == "a c"


def _refuse(folder: TierFolder, name: str, parts: Any) -> None:
    raise OSError(errno.ENOSPC, "full")


def test_what_was_unused_for_a_day_leaves_the_disk_for_a_prefix_of_no_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path, disk_bytes=NUM_SLABS * COLUMN_BYTES) as tier:
        tier.write("a", "doc")
        tier.write("b")
        assert tier.kept("a", "b") == "a"
        monkeypatch.setattr("kv_store.disk.catalog.UNUSED_SECONDS", 0.0)
        tier.write("c")
        assert tier.kept("a", "b", "c") == "c"


def test_what_was_written_last_goes_last_also_after_a_restart(tmp_path: Path) -> None:
    with running(tmp_path, disk_bytes=3 * NUM_SLABS * COLUMN_BYTES) as tier:
        for name in "abc":
            tier.write(name)

        def grow_old() -> None:
            # Only the first column of "c": it is used whenever what follows is.
            for value in (*chain(NUM_SLABS, "a"), *chain(1, "c")):
                os.utime(tier.path / "store-0" / f"{value.hex()}.slabs", (0, 0))

        tier.restart(grow_old)
        tier.write("d")
        assert tier.kept("a", "b", "c", "d") == "b c d"


def test_a_prompt_waits_for_a_disk_that_hangs_once_and_so_long(
    tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, read_column = threading.Event(), TierFiles.read_column

    def hang(files: TierFiles, name: bytes, slabs: Any) -> bool:
        assert goes_on.wait(PATIENCE)
        return read_column(files, name, slabs)

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


def test_another_layout_begins_with_an_empty_tier(tier: Tier) -> None:
    tier.write("a", "doc")
    tier.client.close()
    tier.client = tier.attach(Layout(num_layers=3, num_kv_heads=2, row_format=RowFormat(16)))
    assert tier.client.stats().disk.num_bytes == 0
    assert not tier.files()
    assert not tier.client.list_sessions("me")


def test_stores_of_one_path_have_a_folder_each_and_a_path_that_cannot_be_used_is_refused(
    tier: Tier, tmp_path: Path
) -> None:
    tier.write("a")
    for seconds, name in ((0.0, "store-1"), (PATIENCE, "store-1")):
        second = take_folder(tier.path, seconds)
        assert (second.path.name, list(second.names())) == (name, [])
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
