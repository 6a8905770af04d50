"""The head of a GGUF file: its metadata, and where its tensors lie. Reads no tensor, and needs no library.

A head holds a vocabulary of some hundred thousand words, which both the worker and the gateway need at their start; the
package `gguf`, which makes arrays of every word, takes many seconds for it. It dequantises what the worker finds here.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

MAGIC = b"GGUF"
VERSIONS = (2, 3)
_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
# by type: how `struct` reads one value
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_DIMENSIONS = 4
_TRUNCATED = "is truncated or damaged; download it again"


class GGUFError(ValueError):
    """A file that is no GGUF file, or one that cannot be read; the text names it and says what to do."""


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor's data begins in the file. `shape` as PyTorch has it, last dimension contiguous; `type_id`: the
    number of its type in ggml."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


@dataclass(frozen=True, slots=True)
class GGUFHead:
    """metadata: by key; an array is a list. size: of the whole file, in bytes."""

    path: Path
    metadata: Mapping[str, object]
    tensors: Mapping[str, TensorPlace]
    size: int

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))


def read_gguf(path: Path) -> GGUFHead:
    """Raises GGUFError: no GGUF file, of another version or byte order, one of several parts, or truncated."""
    try:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise GGUFError(f"{path} is no GGUF file; give one, or a Hugging Face model directory")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                head = _read_head(path, data)
    except OSError as error:
        raise GGUFError(f"{path} cannot be read: {error.strerror or error}") from error
    except (struct.error, UnicodeDecodeError) as error:
        raise GGUFError(f"{path} {_TRUNCATED}") from error
    parts = head.metadata.get("split.count", 0)
    if isinstance(parts, int) and parts > 1:
        raise GGUFError(
            f"{path} is one of {parts} parts of a model; join them (`llama-gguf-split --merge`) and give the result"
        )
    return head


def _read_head(path: Path, data: mmap.mmap) -> GGUFHead:
    cursor = _Cursor(path, data, len(MAGIC))
    version = cursor.scalar("I")
    if version not in VERSIONS:
        # a file of the other byte order has a version with nothing in its low half
        what = "is big-endian" if version & 0xFFFF == 0 else f"is of GGUF version {version}"
        raise GGUFError(
            f"{path} {what}; supported: version {' and '.join(map(str, VERSIONS))}, little-endian"
        )
    num_tensors, num_pairs = cursor.scalar("Q"), cursor.scalar("Q")
    metadata: dict[str, object] = {}
    for _ in range(num_pairs):
        key = cursor.text()
        metadata[key] = cursor.value(cursor.scalar("I"))
    places = []
    for _ in range(num_tensors):
        name, num_dimensions = cursor.text(), cursor.scalar("I")
        if num_dimensions > _MAX_DIMENSIONS:
            raise GGUFError(f"{path} {_TRUNCATED}: {name!r} has {num_dimensions} dimensions")
        shape = tuple(reversed(cursor.scalars("Q", num_dimensions)))
        places.append(TensorPlace(name, shape, cursor.scalar("I"), cursor.scalar("Q")))
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise GGUFError(f"{path} {_TRUNCATED}: general.alignment is {alignment!r}")
    begin = -(-cursor.at // alignment) * alignment
    tensors = {
        place.name: TensorPlace(place.name, place.shape, place.type_id, begin + place.offset)
        for place in places
    }
    if len(tensors) < len(places):
        raise GGUFError(f"{path} {_TRUNCATED}: two tensors have one name")
    return GGUFHead(path, metadata, tensors, len(data))


class _Cursor:
    """Reads values one after another, and never beyond the file."""

    def __init__(self, path: Path, data: mmap.mmap, at: int) -> None:
        self._path = path
        self._data = data
        self.at = at

    def scalars(self, code: str, count: int) -> tuple:
        size = count * struct.calcsize(f"<{code}")
        self._check(size)
        values = struct.unpack_from(f"<{count}{code}", self._data, self.at)
        self.at += size
        return values

    def scalar(self, code: str) -> int:
        return self.scalars(code, 1)[0]

    def text(self) -> str:
        size = self.scalar("Q")
        self._check(size)
        self.at += size
        return self._data[self.at - size : self.at].decode("utf-8")

    def value(self, kind: int) -> object:
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.scalar(self._code(kind))
        element, count = self.scalar("I"), self.scalar("Q")
        if element == _STRING:
            # each takes its length at least: a wrong count must not become a long loop
            self._check(8 * count)
            return [self.text() for _ in range(count)]
        return list(self.scalars(self._code(element), count))

    def _code(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise GGUFError(f"{self._path} {_TRUNCATED}: a value of type {kind}")
        return _SCALARS[kind]

    def _check(self, size: int) -> None:
        if size > len(self._data) - self.at:
            raise GGUFError(f"{self._path} {_TRUNCATED}")
