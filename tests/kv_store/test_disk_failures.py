"""Tests of failing, full and foreign disks: what each costs, and what is still found there."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from store_samples import TOKENS, chain
from tiers import COLUMN_BYTES, NUM_SLABS, Tier, fail_once, flipped, hold_writes, running
from waiting import PATIENCE, wait_until

from kv_store.client import Layout, PrefixLoading, RowFormat
from kv_store.disk.folder import SESSIONS, TierFolder


def test_a_session_that_finds_no_room_on_a_smaller_disk_is_not_listed(tier: Tier) -> None:
    tier.write("a", "oldest")
    tier.write("b", "newest")

    def shrink() -> None:
        tier.store.config = dataclasses.replace(
            tier.store.config, kv_store_disk_bytes=NUM_SLABS * COLUMN_BYTES
        )

    tier.restart(shrink)
    assert [each.session_id for each in tier.client.list_sessions("me")] == ["newest"]
    assert (tier.num_known("a"), tier.num_known("b")) == (0, NUM_SLABS)


def test_what_could_not_be_removed_to_make_room_is_removed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a disk holds more than it may, and a later store finds again what this one gave up."""
    monkeypatch.setattr("kv_store.disk.tier.PAUSE_SECONDS", 0.0)
    with running(tmp_path, disk_bytes=NUM_SLABS * COLUMN_BYTES) as tier:
        tier.write("b")
        errors = fail_once(monkeypatch, errno.EIO)
        tier.write("c")
        assert not errors
        tier.write("d")
        assert tier.kept("b", "c", "d") == "d"
        assert len(tier.files()) == NUM_SLABS


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_what_a_process_lacks_to_read_a_file_costs_no_file(
    tier: Tier, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(code, "not now")

    tier.write("a", "doc")
    tier.restart()
    with monkeypatch.context() as short:
        short.setattr(TierFolder, "open", refuse)
        assert tier.num_known("a") == 0
    assert tier.num_known("a") == NUM_SLABS
    assert [each.num_tokens for each in tier.client.list_sessions("me")] == [NUM_SLABS * TOKENS]


def test_what_cannot_be_tidied_up_costs_nothing_else(tier: Tier) -> None:
    tier.write("a", "doc")
    begun = tier.path / "store-0" / f"{chain(1, 'a')[0].hex()}.slabs.new"
    others = tier.path / "store-0" / "notes.new"

    def leave() -> None:
        begun.mkdir()
        others.touch()

    tier.restart(leave)
    assert tier.num_known("a") == NUM_SLABS
    assert others.exists()


def test_another_layout_is_read_from_the_disk_whatever_was_loaded_before(tier: Tier) -> None:
    tier.write("a", num_slabs=1)
    tier.restart()
    with pytest.raises(PrefixLoading):
        tier.client.begin("gone", 0, chain(1, "a"))
    # Nobody asks again.
    wait_until(lambda: tier.client.stats().disk.hit_tokens)
    tier.client.close()
    tier.client = tier.attach(Layout(num_layers=3, num_kv_heads=2, row_format=RowFormat(16)))
    hashes = chain(1, "b")
    tier.client.begin("b", TOKENS, hashes)
    tier.client.seal("b", TOKENS, 0, None, hashes)
    tier.client.end("b")
    tier.client.stats()
    tier.store.server.store.settle()
    tier.client.begin("all", 21 * TOKENS)
    tier.client.end("all")
    tier.client.stats()
    assert tier.begin("again", 0, hashes) == TOKENS


def listing(sessions: object) -> Callable[[Path], object]:
    """A list of sessions that no store writes, with its digest."""
    text = json.dumps(sessions).encode()
    return lambda file: file.write_bytes(hashlib.blake2b(text, digest_size=32).digest() + text)


@pytest.mark.parametrize(
    "change",
    [
        flipped(200),
        *map(listing, ([{"name": "odd"}], [{"last": 5}], [{"last": "00", "from": "another"}], 5)),
    ],
)
def test_a_list_of_sessions_that_is_not_what_a_store_wrote_costs_no_rows(
    tier: Tier, change: Callable[[Path], object]
) -> None:
    tier.write("a", "doc")
    tier.restart(lambda: change(tier.path / "store-0" / SESSIONS))
    assert not tier.client.list_sessions("me")
    assert tier.num_known("a") == NUM_SLABS
    assert tier.client.stats().disk.num_corrupt == 1
    tier.write("a", "doc")
    tier.restart()
    assert [each.session_id for each in tier.client.list_sessions("me")] == ["doc"]


def test_what_is_written_anew_before_it_was_removed_stays(
    tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier.write("a", "doc")
    names = chain(NUM_SLABS, "a")
    tier.restart(lambda: (tier.path / "store-0" / f"{names[0].hex()}.slabs").unlink())
    _, goes_on = hold_writes(monkeypatch)
    # While its first slab is written the session is dropped, which leaves what another has, and all is known again.
    for number, (num_slabs, session) in enumerate(((NUM_SLABS, "doc"), (1, "other"), (NUM_SLABS, ""))):
        tier.seal(f"{number}", "a", session, num_slabs)
        if session == "other":
            tier.client.drop_session("doc")
    goes_on.set()
    tier.store.server.store.settle()
    assert tier.kept("a") == "a"
    assert tier.client.stats().disk.num_bytes == NUM_SLABS * COLUMN_BYTES


def test_the_sessions_and_prefixes_that_wait_for_a_disk_that_hangs_are_bounded(
    tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kv_store.disk.tier.MAX_WAITING", 3)
    begins, goes_on = hold_writes(monkeypatch)
    tier.seal("0", "0", num_slabs=1)
    assert begins.wait(PATIENCE)
    # One that waits already takes no further place.
    for name in ("1", "2", "3", "3", "4"):
        tier.seal(name, name, num_slabs=1)
    assert tier.client.stats().disk.num_skipped == 1
    goes_on.set()
    tier.store.server.store.settle()
    assert tier.client.stats().disk.num_bytes == 4 * COLUMN_BYTES
    tier.restart()
    # The one that waited for longest is left out.
    assert [tier.num_known(name, 1) for name in "01234"] == [1, 0, 1, 1, 1]


@pytest.mark.parametrize("pause", [0.0, PATIENCE])
def test_what_could_not_be_removed_is_tried_again_at_the_end_at_the_latest(
    tier: Tier, monkeypatch: pytest.MonkeyPatch, pause: float
) -> None:
    monkeypatch.setattr("kv_store.disk.tier.PAUSE_SECONDS", pause)
    tier.write("a", "doc")
    errors = fail_once(monkeypatch, errno.EIO)
    tier.client.drop_session("doc")
    tier.store.server.store.settle()
    assert not errors
    assert bool(tier.files()) == (pause > 0)
    tier.restart()
    assert not tier.files()
    assert not tier.client.list_sessions("me")
