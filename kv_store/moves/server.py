"""Where other hosts' stores ask: one method, and only with the token."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import grpc

from kv_store.errors import ConfigError
from kv_store.moves.servicer import PrefixSourceServicer
from kv_store.moves.source import MAX_READINGS
from kv_store.v1 import kv_store_pb2_grpc

_MAX_REQUEST_BYTES = 4 << 20
# Beside those that read: they are told that there are too many.
_SPARE_CALLS = 4


class PeerServer:
    """Serves PrefixSource at HOST:PORT from construction to `close`; `port` is the one it got.

    Raises ConfigError when the address cannot be had.
    """

    def __init__(self, address: str, servicer: PrefixSourceServicer) -> None:
        num_calls = MAX_READINGS + _SPARE_CALLS
        self._threads = ThreadPoolExecutor(num_calls, thread_name_prefix="peer-call")
        self._server = grpc.server(
            self._threads,
            maximum_concurrent_rpcs=num_calls,
            options=(
                ("grpc.max_receive_message_length", _MAX_REQUEST_BYTES),
                ("grpc.so_reuseport", 0),
            ),
        )
        kv_store_pb2_grpc.add_PrefixSourceServicer_to_server(servicer, self._server)
        try:
            self.port = self._server.add_insecure_port(address)
        except RuntimeError as exc:
            self._threads.shutdown(wait=False)
            raise ConfigError(f"--peer-listen {address}: the address cannot be used") from exc
        self._server.start()

    def close(self) -> None:
        """Cut off what is being read."""
        self._server.stop(None).wait(5.0)
        self._threads.shutdown(wait=False, cancel_futures=True)
