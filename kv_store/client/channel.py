"""The way to a store: plain within a machine, or over TLS to one on another host."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

Options = Sequence[tuple[str, int]]


def open_channel(target: str, options: Options, root: bytes = b"") -> grpc.Channel:
    """A channel to `target`. root: PEM certificates by which the store's is known, which must be for the host's name;
    empty: without TLS."""
    if not root:
        return grpc.insecure_channel(target, options=options)
    return grpc.secure_channel(target, grpc.ssl_channel_credentials(root), options=options)
