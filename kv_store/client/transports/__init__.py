"""Transports by name."""

from __future__ import annotations

from kv_store.client.errors import InvalidStoreRequest
from kv_store.client.transports.base import Transport
from kv_store.client.transports.grpc_stream import GrpcStreamTransport
from kv_store.client.transports.mapped import ShmTransport, ZeroCopyTransport

__all__ = ["Transport", "transport_class"]

_TRANSPORTS: dict[str, type[Transport]] = {
    kind.name: kind for kind in (ZeroCopyTransport, ShmTransport, GrpcStreamTransport)
}


def transport_class(name: str) -> type[Transport]:
    """Raises InvalidStoreRequest for an unknown name, listing the known ones."""
    transport = _TRANSPORTS.get(name)
    if transport is None:
        raise InvalidStoreRequest(f"transport {name!r} is none of {', '.join(_TRANSPORTS)}")
    return transport
