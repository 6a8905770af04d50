"""What this gateway is made of: it works only with a worker of the same edition."""

from __future__ import annotations

import functools
import hashlib

from gateway.errors import VersionMismatch
from gateway.version import package_version
from gpu_worker.v1 import gpu_worker_pb2 as pb

DIGEST_BYTES = 4
REMEDY = "install one version for both and start both anew (docs/deployment.md, Upgrading)."


@functools.cache
def own_edition() -> pb.Edition:
    """Carrel's version, and a digest of the worker's messages, which tells two checkouts of one version apart."""
    digest = hashlib.blake2b(pb.DESCRIPTOR.serialized_pb, digest_size=DIGEST_BYTES)
    return pb.Edition(version=package_version(), messages=digest.hexdigest())


def check_edition(worker: pb.Edition) -> None:
    """Raises VersionMismatch for a worker of another edition."""
    own = own_edition()
    if worker != own:
        raise VersionMismatch(f"The gateway is {_name(own)}, the model worker is {_name(worker)}: {REMEDY}")


def _name(edition: pb.Edition) -> str:
    return f"Carrel {edition.version or 'of no known version'} (messages {edition.messages or 'unknown'})"
