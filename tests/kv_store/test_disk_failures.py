"""What a disk that fails, is full or is another's costs: what is given up is given up, and what is there is found."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from tiers import COLUMN_BYTES, NUM_SLABS, running

from kv_store.disk.folder import TierFolder


def test_what_could_not_be_removed_to_make_room_is_removed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a disk holds more than it may, and a later store finds again what this one gave up."""
    monkeypatch.setattr("kv_store.disk.write_queue.PAUSE_SECONDS", 0.0)
    with running(tmp_path, disk_bytes=NUM_SLABS * COLUMN_BYTES) as tier:
        tier.write("b")
        remove, errors = TierFolder.remove, [OSError(errno.EIO, "it fails")]

        def fail_once(folder: TierFolder, name: bytes, kind: str) -> None:
            if errors:
                raise errors.pop()
            remove(folder, name, kind)

        monkeypatch.setattr(TierFolder, "remove", fail_once)
        tier.write("c")
        assert not errors
        tier.write("d")
        assert tier.kept("b", "c", "d") == "d"
        assert len(tier.files("slabs")) == NUM_SLABS
