"""The folder of a disk tier: files that are there whole or not at all, in a folder that one store holds."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import time
from collections.abc import Sequence
from io import BufferedReader
from pathlib import Path

from kv_store.errors import ConfigError

# Stores that may share a path, each with a folder of its own in it.
MAX_STORES = 64
# A helper of a killed store may outlive it for so long and hold its folder.
WAIT_SECONDS = 10.0
_POLL_SECONDS = 0.1
SESSIONS = "sessions"
_TEMPORARY = ".new"
_OURS = re.compile(rf"([0-9a-f]{{64}}\.slabs|{SESSIONS})({re.escape(_TEMPORARY)})?")
# No link is followed, and no pipe is waited for.
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class TierFolder:
    """The files of one store, by name. Every method raises OSError; its caller checks what is read. A file is written
    under a temporary name, and gets its own when it is whole and on the disk."""

    def __init__(self, path: Path, descriptor: int) -> None:
        """descriptor: of the folder, held until `close`, with the lock on it. Made by `take_folder`."""
        self.path = path
        self.descriptor = descriptor

    def names(self) -> list[str]:
        """Our files; what a write left unfinished is removed, and other files are left alone."""
        found = []
        for name in os.listdir(self.descriptor):
            match = _OURS.fullmatch(name)
            if match is not None and match[2] is None:
                found.append(name)
            elif match is not None:
                # The others are usable where this one cannot be removed.
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=self.descriptor)
        return found

    def write(self, name: str, parts: Sequence[bytes | memoryview]) -> None:
        """Write a whole file; nothing is left where this raises."""
        temporary = name + _TEMPORARY
        try:
            with open(temporary, "wb", opener=self._open) as file:
                file.writelines(parts)
                file.flush()
                os.fdatasync(file.fileno())
            os.rename(temporary, name, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=self.descriptor)
            raise

    def open(self, name: str) -> BufferedReader:
        """A file to read from."""
        return open(name, "rb", opener=self._open)

    def sync(self) -> None:
        """Make the names of files that were written before outlive a failure of the machine."""
        os.fsync(self.descriptor)

    def remove(self, name: str) -> None:
        """Remove a file; a missing one is not an error."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.descriptor)

    def close(self) -> None:
        """Let another store have the folder."""
        os.close(self.descriptor)

    def _open(self, name: str, flags: int) -> int:
        return os.open(name, flags | _FLAGS, 0o600, dir_fd=self.descriptor)


def take_folder(path: Path, seconds: float = WAIT_SECONDS) -> TierFolder:
    """Take the first folder `store-N` of this path that no other running store has, or a new one when none becomes free
    within the time, as that of a killed store does. Raises ConfigError."""
    until = time.monotonic() + seconds
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        while True:
            for number in range(MAX_STORES):
                folder = path / f"store-{number}"
                if number and not folder.exists() and time.monotonic() < until:
                    break
                folder.mkdir(mode=0o700, exist_ok=True)
                if (taken := _take(folder)) is not None:
                    return taken
            else:
                raise ConfigError(f"--kv-store-path {path}: {MAX_STORES} stores use it; choose another")
            time.sleep(_POLL_SECONDS)
    except OSError as exc:
        raise ConfigError(
            f"--kv-store-path {path}: it cannot be used: {exc.strerror or exc}; choose one that this user may write to"
        ) from exc


def _take(folder: Path) -> TierFolder | None:
    """A folder with the lock on it; None where another store has it. Raises OSError."""
    descriptor = os.open(folder, _FLAGS | os.O_DIRECTORY)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, descriptor)
        if os.fstat(descriptor).st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, f"{folder.name} is another user's")
        # Rows are prompts: no other user may read them.
        os.fchmod(descriptor, 0o700)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            stack.pop_all()
            return TierFolder(folder, descriptor)
    return None
