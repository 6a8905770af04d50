"""Another store, as one that takes a prefix from it sees it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

import grpc

from kv_store.config import MAX_SOCKET_PATH
from kv_store.errors import InvalidArgument, PeerFailed
from kv_store.v1 import kv_store_pb2 as pb
from kv_store.v1 import kv_store_pb2_grpc

TOKEN_KEY = "authorization"
# A chunk has 1 MiB.
_MAX_MESSAGE_BYTES = 2 << 20
_ADDRESS = re.compile(r"(?:[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}")
# To connect: a host that is gone would otherwise cost a request gRPC's own 20 s.
_CONNECT_MS = 3000
_OPTIONS = (
    ("grpc.min_reconnect_backoff_ms", _CONNECT_MS),
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
)


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Where another store answers. Raises InvalidArgument for anything but unix:PATH and HOST:PORT."""

    text: str

    def __post_init__(self) -> None:
        if self.is_local:
            path = self.text.removeprefix("unix:")
            if path.startswith("/") and "\0" not in path and len(path.encode()) <= MAX_SOCKET_PATH:
                return
        elif _ADDRESS.fullmatch(self.text):
            return
        raise InvalidArgument(
            f"source {self.text[:200]!r} is no store's address: give unix:/PATH or HOST:PORT, its --peer-listen"
        )

    @property
    def is_local(self) -> bool:
        return self.text.startswith("unix:")


def bearer(token: str) -> str:
    """How a token is sent."""
    return f"Bearer {token}"


class PeerStream:
    """One prefix being read from another store. Every failure is PeerFailed and names the store."""

    def __init__(
        self, address: PeerAddress, token: str, request: pb.ReadPrefixRequest, timeout_seconds: float
    ) -> None:
        """token: sent over TCP only; a Unix socket asks for none."""
        self._address = address
        metadata = () if address.is_local or not token else ((TOKEN_KEY, bearer(token)),)
        self._channel = grpc.insecure_channel(address.text, options=_OPTIONS)
        stub = kv_store_pb2_grpc.PrefixSourceStub(self._channel)
        self._call = stub.ReadPrefix(request, timeout=timeout_seconds, metadata=metadata)

    def cancel(self) -> None:
        """End the stream, from any thread."""
        self._call.cancel()

    def header(self) -> pb.PrefixHeader:
        """The first part."""
        part = self._next()
        if part is None or part.WhichOneof("part") != "header":
            raise PeerFailed(f"the store at {self._address.text} began with no header")
        return part.header

    def chunks(self) -> Iterator[pb.PrefixChunk]:
        """Up to the trailer, which is then in `digest`."""
        while part := self._next():
            match part.WhichOneof("part"):
                case "chunk":
                    yield part.chunk
                case "trailer":
                    self.digest = part.trailer.digest
                    return
                case _:
                    break
        raise PeerFailed(f"the store at {self._address.text} ended without a trailer")

    def _next(self) -> pb.PrefixPart | None:
        with self.naming():
            try:
                return next(self._call, None)
            except grpc.RpcError as exc:
                raise PeerFailed(exc.details() or exc.code().name) from exc

    @contextlib.contextmanager
    def naming(self) -> Iterator[None]:
        """Say of which store a PeerFailed is."""
        try:
            yield
        except PeerFailed as exc:
            raise PeerFailed(f"the store at {self._address.text}: {exc}") from exc

    def __enter__(self) -> PeerStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()
        self._channel.close()
