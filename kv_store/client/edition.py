"""What a process is made of: store and worker work together only when both are of one edition."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from importlib import metadata

from google.protobuf.descriptor import FileDescriptor

from kv_store.v1 import kv_store_pb2 as pb

_DIGEST_BYTES = 4
REMEDY = "install one version for both and start both anew, the store first (docs/deployment.md, Upgrading)"


@dataclass(frozen=True, slots=True)
class Edition:
    """Carrel's version, and a digest of the messages, which tells two checkouts of one version apart."""

    version: str
    messages: str

    def __str__(self) -> str:
        if not self.version and not self.messages:
            return "of a version that does not tell its name"
        return f"Carrel {self.version} (messages {self.messages})"

    def refusal(self, own_name: str, other_name: str, other: Edition) -> str | None:
        """Why we, of this edition, must not talk to that other; None where we may."""
        if self == other:
            return None
        return f"{own_name} is {self}, {other_name} is {other}: {REMEDY}"


def edition_of(messages: FileDescriptor) -> Edition:
    """This process's edition, for what talks by these messages."""
    digest = hashlib.blake2b(messages.serialized_pb, digest_size=_DIGEST_BYTES).hexdigest()
    try:
        version = metadata.version("carrel")
    except metadata.PackageNotFoundError:
        version = "unknown"
    return Edition(version, digest)


@functools.cache
def own_edition() -> Edition:
    """Of store and store client."""
    return edition_of(pb.DESCRIPTOR)
