"""A tier's folder with faults in it, in place of the usual one: see `carrel.process.faults`."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from carrel.process.faults import Faults, Kind, Point
from kv_store.disk.folder import OpenFile, TierFolder, take_folder


class FaultyFile(OpenFile):
    """A file of which bits flip while it is read."""

    def __init__(self, file: OpenFile, faults: Faults) -> None:
        super().__init__(file.descriptor, file.num_bytes, file.used_at)
        self._faults = faults

    def read_into(self, room: memoryview, offset: int) -> None:
        super().read_into(room, offset)
        if room and self._faults.strike(Point.DISK_READ) is Kind.FLIP:
            room[self._faults.choose(Point.DISK_READ, len(room))] ^= 0x40


class FaultyFolder(TierFolder):
    """A disk that is slow, full, or loses the end of what was written without a word."""

    def __init__(self, folder: TierFolder, faults: Faults) -> None:
        super().__init__(folder.path, folder.descriptor)
        self._faults = faults

    def write(self, name: bytes, kind: str, parts: Sequence[bytes | memoryview]) -> None:
        match self._faults.strike(Point.DISK_WRITE):
            case Kind.ALLOC:
                raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}, on purpose")
            case Kind.PARTIAL:
                data = b"".join(parts)
                parts = [data[: len(data) // 2]]
        super().write(name, kind, parts)

    @contextlib.contextmanager
    def opened(self, name: bytes, kind: str, most_bytes: int, least_bytes: int = 0) -> Iterator[OpenFile]:
        with super().opened(name, kind, most_bytes, least_bytes) as file:
            yield FaultyFile(file, self._faults)


def faulty_folder(path: Path, faults: Faults) -> TierFolder:
    """`take_folder`, with these faults; without any, itself. Raises ConfigError."""
    folder = take_folder(path)
    return FaultyFolder(folder, faults) if faults else folder
