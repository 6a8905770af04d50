"""A store that other users can reach serves only calls that show its token."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import Any

import grpc
from grpc_health.v1 import health

from kv_store.client.rpc import TOKEN_KEY, token_metadata


class TokenCheck(grpc.ServerInterceptor):
    """Refuses every call without the token, but those that ask for the store's health."""

    def __init__(self, token: str) -> None:
        ((_, shown),) = token_metadata(token)
        self._expected = shown.encode()
        self._refuse = grpc.unary_unary_rpc_method_handler(_refuse)

    def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Any], call: grpc.HandlerCallDetails
    ) -> Any:
        shown = dict(call.invocation_metadata).get(TOKEN_KEY, "")
        shown = shown.encode() if isinstance(shown, str) else shown
        is_health = call.method.startswith(f"/{health.SERVICE_NAME}/")
        if is_health or hmac.compare_digest(shown, self._expected):
            return continuation(call)
        return self._refuse


def _refuse(request: object, context: grpc.ServicerContext) -> None:
    context.abort(
        grpc.StatusCode.UNAUTHENTICATED,
        "wrong token, or none: give the store and its workers the same CARREL_STORE_TOKEN or --store-token-file",
    )
