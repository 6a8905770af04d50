"""The folder of a disk tier: files that are there whole or not at all, in a folder that one store holds."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from kv_store.disk.errors import DamagedFile
from kv_store.errors import ConfigError
from kv_store.prefixes import HASH_BYTES

# Stores that may share a path, each with a folder of its own in it.
MAX_STORES = 64
# A killed store's helper may live so long after it, and hold its folder.
WAIT_SECONDS = 10.0
_LOOK_SECONDS = 0.1
SLABS, SESSION = "slabs", "session"
_TEMPORARY = ".new"
_NAME = re.compile(rf"([0-9a-f]{{{2 * HASH_BYTES}}})\.({SLABS}|{SESSION})({re.escape(_TEMPORARY)})?")
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class TierFolder:
    """Names are hashes, and the kind of file is behind them. Every method raises OSError; what is read is checked by
    its caller. A file is written beside its name, and gets it when it is whole and on the disk."""

    def __init__(self, path: Path, descriptor: int) -> None:
        """descriptor: of the folder, held until `close`, with the lock on it. Made by `take_folder`."""
        self.path = path
        self.descriptor = descriptor

    def files(self) -> Iterator[tuple[bytes, str]]:
        """Name and kind of each file; what a write left unfinished is removed, and what is not ours left alone."""
        for file in os.listdir(self.descriptor):
            if (match := _NAME.fullmatch(file)) is None:
                continue
            if match[3] is None:
                yield bytes.fromhex(match[1]), match[2]
                continue
            # One that cannot be removed keeps nobody from the others.
            with contextlib.suppress(OSError):
                os.unlink(file, dir_fd=self.descriptor)

    def write(self, name: bytes, kind: str, parts: Sequence[bytes | memoryview]) -> None:
        """Nothing is left where this raises."""
        file = _file(name, kind)
        descriptor = os.open(file + _TEMPORARY, _WRITE, 0o600, dir_fd=self.descriptor)
        try:
            try:
                for part in parts:
                    left = memoryview(part).cast("B")
                    while left:
                        left = left[os.write(descriptor, left) :]
                os.fdatasync(descriptor)
            finally:
                os.close(descriptor)
            os.rename(file + _TEMPORARY, file, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(file + _TEMPORARY, dir_fd=self.descriptor)
            raise

    def free_bytes(self) -> int:
        """That the disk has left for this user; a quota may leave less."""
        disk = os.fstatvfs(self.descriptor)
        return disk.f_bavail * disk.f_frsize

    def sync(self) -> None:
        """What was written before stays when the machine fails."""
        os.fsync(self.descriptor)

    @contextlib.contextmanager
    def opened(self, name: bytes, kind: str, most_bytes: int, least_bytes: int = 0) -> Iterator[OpenFile]:
        """A file to read from. Raises DamagedFile for what is no plain file, or of another size."""
        try:
            descriptor = os.open(_file(name, kind), _READ, dir_fd=self.descriptor)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise DamagedFile("it is a link") from error
            raise
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise DamagedFile("it is no plain file")
            if not least_bytes <= status.st_size <= most_bytes:
                raise DamagedFile(f"it has {status.st_size} bytes")
            yield OpenFile(descriptor, status.st_size, status.st_mtime)
        finally:
            os.close(descriptor)

    def remove(self, name: bytes, kind: str) -> None:
        """One that is not there is no error."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_file(name, kind), dir_fd=self.descriptor)

    def renew(self, name: bytes, kind: str) -> None:
        """It was used now."""
        os.utime(_file(name, kind), dir_fd=self.descriptor, follow_symlinks=False)

    def close(self) -> None:
        """Another store may have it."""
        os.close(self.descriptor)


class OpenFile:
    """num_bytes: of it. used_at: when it was last used, Unix time in seconds."""

    def __init__(self, descriptor: int, num_bytes: int, used_at: float) -> None:
        self.descriptor = descriptor
        self.num_bytes = num_bytes
        self.used_at = used_at

    def read(self, num_bytes: int, offset: int = 0) -> bytes:
        """Raises DamagedFile where there are fewer."""
        data = bytearray(num_bytes)
        self.read_into(memoryview(data), offset)
        return bytes(data)

    def read_into(self, room: memoryview, offset: int) -> None:
        """Fill `room`, of bytes. Raises DamagedFile where the file ends before."""
        while room:
            count = os.preadv(self.descriptor, [room], offset)
            if not count:
                raise DamagedFile("it ends too early")
            room, offset = room[count:], offset + count


def take_folder(path: Path, seconds: float = WAIT_SECONDS) -> TierFolder:
    """The first folder `store-N` of this path that no other running store has; a new one where none comes free within
    the time, as that of a store that was killed just now does. Raises ConfigError."""
    until = time.monotonic() + seconds
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        while True:
            folders = [path / f"store-{number}" for number in range(MAX_STORES)]
            for folder in filter(Path.exists, folders):
                if (taken := _take(folder)) is not None:
                    return taken
            missing = next((folder for folder in folders if not folder.exists()), None)
            if missing is None:
                break
            if missing == folders[0] or time.monotonic() >= until:
                missing.mkdir(mode=0o700, exist_ok=True)
                continue
            time.sleep(_LOOK_SECONDS)
    except OSError as exc:
        raise ConfigError(
            f"--kv-store-path {path}: it cannot be used: {exc.strerror or exc}; choose one that this user may write to"
        ) from exc
    raise ConfigError(f"--kv-store-path {path}: {MAX_STORES} stores use it; choose another")


def _take(folder: Path) -> TierFolder | None:
    """None where another store has it. Raises OSError."""
    descriptor = os.open(folder, _FOLDER)
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            raise PermissionError(1, f"{folder.name} is another user's")
        # Rows are prompts: nobody else is to read them.
        os.fchmod(descriptor, 0o700)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(13, "it cannot be written to")
        return TierFolder(folder, descriptor)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise


def _file(name: bytes, kind: str) -> str:
    return f"{name.hex()}.{kind}"
