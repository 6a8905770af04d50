"""Trailing metadata of a gRPC error."""

from __future__ import annotations

from typing import Any, Protocol


class CallError(Protocol):
    """An error of grpc's or of grpc.aio's."""

    def trailing_metadata(self) -> Any:
        """Pairs, or None."""


def trailing_of(error: CallError) -> dict[str, str]:
    """Its trailing metadata. They are read as pairs: up to grpcio 1.76 those of grpc.aio had no keys that work."""
    return dict([*(error.trailing_metadata() or ())])
