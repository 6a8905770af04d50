"""`carrel.kv_store.v1.PrefixSource`: messages in, parts of a prefix out."""

from __future__ import annotations

import hmac
import zlib
from collections.abc import Iterator

import grpc

from carrel.process.version import Edition
from kv_store.client import wire
from kv_store.client.requests import MAX_PULL_SECONDS
from kv_store.errors import InvalidArgument, VersionMismatch
from kv_store.moves.checksums import Checksums
from kv_store.moves.peer import TOKEN_KEY, bearer
from kv_store.moves.source import PrefixSource, Reading
from kv_store.statuses import abort
from kv_store.v1 import kv_store_pb2 as pb
from kv_store.v1 import kv_store_pb2_grpc

# A clock's grain, and the way of a message.
_SLACK_SECONDS = 5.0


class PrefixSourceServicer(kv_store_pb2_grpc.PrefixSourceServicer):
    """Gives prefixes to whoever knows their hashes and, where there is one, the token."""

    def __init__(self, edition: Edition, source: PrefixSource, token: str | None = None) -> None:
        self._edition = edition
        self._source = source
        self._expected = None if token is None else bearer(token).encode()

    def ReadPrefix(
        self, request: pb.ReadPrefixRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.PrefixPart]:
        if not self._knows_token(context):
            context.abort(
                grpc.StatusCode.UNAUTHENTICATED, "wrong token: all stores need the same CARREL_PEER_TOKEN"
            )
        try:
            reading = self._open(request, context)
            try:
                # Also when the caller dies while a message waits to be sent.
                if context.add_callback(reading.close):
                    yield from _parts(reading)
            finally:
                reading.close()
        except Exception as exc:
            abort(context, "ReadPrefix", exc)

    def _knows_token(self, context: grpc.ServicerContext) -> bool:
        if self._expected is None:
            return True
        sent = dict(context.invocation_metadata()).get(TOKEN_KEY, "")
        return hmac.compare_digest(sent.encode() if isinstance(sent, str) else sent, self._expected)

    def _open(self, request: pb.ReadPrefixRequest, context: grpc.ServicerContext) -> Reading:
        caller = wire.edition_from_message(request.edition)
        if reason := self._edition.refusal("this store", "the other", caller):
            raise VersionMismatch(reason)
        # Without one, a caller that stops reading would hold the slabs for ever.
        if not context.time_remaining() <= MAX_PULL_SECONDS + _SLACK_SECONDS:
            raise InvalidArgument(f"ReadPrefix needs a deadline of at most {MAX_PULL_SECONDS:g} s")
        layout = wire.layout_from_message(request.layout)
        hashes = tuple(request.prefix_hashes)
        return self._source.open(layout, request.tokens_per_slab, hashes, request.num_known)


def _parts(reading: Reading) -> Iterator[pb.PrefixPart]:
    yield pb.PrefixPart(header=pb.PrefixHeader(num_found=reading.num_found, num_bytes=reading.num_bytes))
    checksums = Checksums()
    for data in reading.chunks():
        checksum = zlib.crc32(data)
        checksums.add(checksum)
        yield pb.PrefixPart(chunk=pb.PrefixChunk(data=data, checksum=checksum))
    yield pb.PrefixPart(trailer=pb.PrefixTrailer(digest=checksums.digest()))
