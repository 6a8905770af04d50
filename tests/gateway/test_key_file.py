"""The file of API keys as it is: a key that was taken out opens nothing, whatever the file's size and times say."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from gateway.key_file import RELOAD_SECONDS, KeyFile


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def replace(path: Path, text: str) -> None:
    """In place, of the same size and times."""
    before = path.stat()
    path.write_text(text)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == (
        before.st_size,
        before.st_mtime_ns,
        before.st_ino,
    )


def keys(file: KeyFile) -> list[str]:
    return [entry.key for entry in file.entries()]


def test_a_key_that_was_replaced_in_place_is_known_a_second_later(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys.yaml", Clock()
    path.write_text("- {name: a, key: old}")
    file = KeyFile(path, clock)
    replace(path, "- {name: a, key: new}")
    assert keys(file) == ["old"]
    clock.now += RELOAD_SECONDS
    assert keys(file) == ["new"]


def test_entries_stay_the_same_while_the_content_does(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys.yaml", Clock()
    path.write_text("- {name: a, key: k}")
    file = KeyFile(path, clock)
    before = file.entries()
    path.write_text("- {name: a, key: k}")
    os.utime(path, (1, 1))
    clock.now += RELOAD_SECONDS
    assert file.entries() is before


def test_a_file_that_cannot_be_used_is_told_once_and_leaves_the_keys(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, clock = tmp_path / "keys.yaml", Clock()
    path.write_text("- {name: a, key: k}")
    file = KeyFile(path, clock)
    for change in (lambda: path.write_text("- {name: a"), path.unlink):
        change()
        caplog.clear()
        with caplog.at_level(logging.ERROR):
            for _ in range(3):
                clock.now += RELOAD_SECONDS
                assert keys(file) == ["k"]
        assert len(caplog.messages) == 1
    path.write_text("- {name: a, key: other}")
    clock.now += RELOAD_SECONDS
    assert keys(file) == ["other"]
