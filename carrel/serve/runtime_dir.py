"""The private folder of one run of `carrel serve`, or of what measures: sockets, and what its processes leave."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from carrel.process.options import OptionError

PREFIX = "carrel-"
LOCK = "lock"
# a Unix socket's path has 107 bytes, and Ray's own take some 80 below the folder
MAX_BASE_LENGTH = 20
# below it Ray ends with a traceback at its first log
MIN_FREE_BYTES = 512 << 10
REMEDY = (
    f"make room there, or name another folder, of {MAX_BASE_LENGTH} characters at most: XDG_RUNTIME_DIR=DIR"
)


def base_dir() -> Path:
    """XDG_RUNTIME_DIR when it is usable and short enough for socket paths, else /tmp."""
    candidate = os.environ.get("XDG_RUNTIME_DIR", "")
    if candidate and len(candidate) <= MAX_BASE_LENGTH and os.access(candidate, os.W_OK | os.X_OK):
        return Path(candidate)
    return Path("/tmp")


@contextmanager
def runtime_dir(base: Path | None = None) -> Iterator[Path]:
    """A new folder of mode 0700, removed at the end with all that is in it.

    Its lock is held meanwhile, so a later run can tell, and remove, a folder whose owner was killed. Raises OptionError
    when `base` is full or may not be written to.
    """
    base = base_dir() if base is None else base
    remove_stale(base)
    try:
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
        free = shutil.disk_usage(path).free
    except OSError as error:
        raise OptionError(f"{base} cannot hold sockets and logs: {error.strerror}; {REMEDY}") from error
    if free < MIN_FREE_BYTES:
        path.rmdir()
        raise OptionError(f"{base} cannot hold sockets and logs: {free:,} bytes are free; {REMEDY}")
    # held before it has the name by which a start beside this one looks for folders without an owner
    unnamed = path / f"{LOCK}.new"
    lock = os.open(unnamed, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        unnamed.rename(path / LOCK)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def remove_stale(base: Path) -> list[Path]:
    """Remove our user's folders under `base` whose owner is gone, and return them."""
    removed = []
    for path in base.glob(f"{PREFIX}*/{LOCK}"):
        try:
            # a folder of another user, or one just removed by its owner, is none of ours
            if path.parent.stat().st_uid != os.getuid():
                continue
            lock = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue
        else:
            shutil.rmtree(path.parent, ignore_errors=True)
            removed.append(path.parent)
        finally:
            os.close(lock)
    return removed
