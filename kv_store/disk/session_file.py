"""A session's file: a digest and a line of JSON. What it holds lies in files of slabs, which it names."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from dataclasses import dataclass
from typing import Any

from kv_store.disk.errors import DamagedFile
from kv_store.prefixes import HASH_BYTES
from kv_store.sessions import Session

# A million tokens in slabs of 32 tokens have two megabytes of names.
MAX_BYTES = 16 << 20
MAX_CHARACTERS = 256
_FIELDS = {"name", "owner", "label", "created_at", "used_at", "pinned_until", "hashes"}


@dataclass(frozen=True, slots=True)
class SavedSession:
    """What is kept of a session: its first slabs, `hashes`, and what it was told of it. Times as in `Session`."""

    name: str
    owner: str
    label: str
    created_at: float
    used_at: float
    pinned_until: float
    hashes: tuple[bytes, ...]

    @classmethod
    def of(cls, name: str, session: Session, hashes: tuple[bytes, ...]) -> SavedSession:
        return cls(
            name,
            session.owner,
            session.label,
            session.created_at,
            session.used_at,
            session.pinned_until,
            hashes,
        )


def file_name(name: str) -> bytes:
    """A session's file is named by a digest: the session's own name is whatever a worker gave."""
    return hashlib.blake2b(name.encode(), digest_size=HASH_BYTES).digest()


def to_bytes(session: SavedSession) -> bytes:
    endless = session.pinned_until == math.inf
    line = json.dumps(
        {
            "name": session.name,
            "owner": session.owner,
            "label": session.label,
            "created_at": session.created_at,
            "used_at": session.used_at,
            "pinned_until": None if endless else session.pinned_until,
            "hashes": [value.hex() for value in session.hashes],
        }
    ).encode()
    return hashlib.blake2b(line).hexdigest().encode() + b"\n" + line


def from_bytes(data: bytes, name: bytes) -> SavedSession:
    """The session in the file of this name. Raises DamagedFile."""
    digest, _, line = data.partition(b"\n")
    if digest != hashlib.blake2b(line).hexdigest().encode():
        raise DamagedFile("it is not what was written")
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DamagedFile("it is not JSON") from error
    if type(found) is not dict or set(found) != _FIELDS:
        raise DamagedFile("it has other fields than a session")
    found_name, owner, label = (_text(found[key]) for key in ("name", "owner", "label"))
    created_at, used_at = _seconds(found["created_at"]), _seconds(found["used_at"])
    pinned_until = math.inf if found["pinned_until"] is None else _seconds(found["pinned_until"])
    if file_name(found_name) != name:
        raise DamagedFile("another session's file has its name")
    hashes = _hashes(found["hashes"])
    return SavedSession(found_name, owner, label, created_at, used_at, pinned_until, hashes)


def _text(value: Any) -> str:
    # JSON has texts that have no bytes: halves of a surrogate pair.
    if (
        type(value) is not str
        or len(value) > MAX_CHARACTERS
        or value.encode(errors="replace").decode() != value
    ):
        raise DamagedFile("a name in it is none")
    return value


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value <= sys.float_info.max:
        raise DamagedFile("a time in it is none")
    return float(value)


def _hashes(values: Any) -> tuple[bytes, ...]:
    try:
        found = tuple(bytes.fromhex(value) for value in values)
    except (TypeError, ValueError) as error:
        raise DamagedFile("a hash in it is none") from error
    if any(len(value) != HASH_BYTES for value in found):
        raise DamagedFile("a hash in it is none")
    return found
