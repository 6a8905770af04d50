"""Every error that the gateway raises on purpose. None of them knows a protocol."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from carrel.process.options import OptionError
from carrel.process.request_limits import LimitError

STORE_UNAVAILABLE = "store_unavailable"


class ConfigError(OptionError):
    """A start-up option that cannot be used."""


class ServiceError(Exception):
    """A request that cannot be served; `retry_after_s` says when another try makes sense."""

    def __init__(
        self,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s


class InvalidRequest(ServiceError):
    """A request field that is missing, of the wrong type or out of range."""


@contextmanager
def invalid_requests() -> Iterator[None]:
    """A LimitError within is raised as an InvalidRequest."""
    try:
        yield
    except LimitError as error:
        raise InvalidRequest(str(error), error.param, error.code) from error


class NoEmbeddings(InvalidRequest):
    """Asked of a model that generates text."""

    def __init__(self) -> None:
        super().__init__(
            "This server has no embeddings: its model generates text. Serve an embedding model beside it.",
            "model",
            "embeddings_not_supported",
        )


class Unauthorized(ServiceError):
    """No API key, or a wrong one."""

    def __init__(self) -> None:
        super().__init__(
            "Missing or wrong API key. Send it once, as 'Authorization: Bearer KEY'.", code="invalid_api_key"
        )


class Forbidden(ServiceError):
    """Something that this server does for nobody, or not for this client."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message, code=code)


class UnknownModel(ServiceError):
    """A model name that is not served."""

    def __init__(self, model: str, served: str) -> None:
        shown = repr(model if len(model) <= 100 else model[:100] + "...")
        super().__init__(
            f"The model {shown} does not exist. This server serves {served!r}.",
            "model",
            "model_not_found",
        )


class UnknownSession(ServiceError):
    """A session that the caller has not, or no longer."""

    def __init__(self, session_id: str) -> None:
        shown = repr(session_id if len(session_id) <= 100 else session_id[:100] + "...")
        super().__init__(
            f"No session {shown} of this key is held: it was dropped, its room was needed, or the KV store was "
            "restarted. Warm it with POST, or name it as session_id in a request.",
            "session_id",
            "session_not_found",
        )


class UnknownAttention(ServiceError):
    """A request that the caller does not have, or whose attention is not told."""

    def __init__(self, request_id: str) -> None:
        shown = repr(request_id if len(request_id) <= 100 else request_id[:100] + "...")
        super().__init__(
            f"No request {shown} of this key tells what it attends: it did not ask with carrel.attention, has not "
            "begun, or ended long ago.",
            "request_id",
            "attention_not_found",
        )


class UnknownResponse(ServiceError):
    """A response that the caller has not, or no longer."""

    def __init__(self, response_id: str) -> None:
        shown = repr(response_id if len(response_id) <= 100 else response_id[:100] + "...")
        super().__init__(
            f"No response {shown} of this key is kept: it was deleted, or made with store false, its room was "
            "needed, or the server was restarted. Send the whole conversation as input.",
            "previous_response_id",
            "previous_response_not_found",
        )


class TooLarge(ServiceError):
    """A request of too many bytes, or of too many values: reading it would hold up others."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="request_too_large")


class SlowBody(ServiceError):
    """A request body that did not arrive in time."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(f"The request body did not arrive within {timeout_s:g} s; see --body-timeout.")


class Overloaded(ServiceError):
    """No room for the request now."""

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message, code="overloaded", retry_after_s=retry_after_s)


class TooManyRequests(ServiceError):
    """One API key has as much as it may have; the text says of what."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message, code="too_many_requests", retry_after_s=retry_after_s)


class ShuttingDown(ServiceError):
    """The server is draining and admits nothing new."""

    def __init__(self) -> None:
        super().__init__("The server is shutting down.", code="shutting_down", retry_after_s=5)


class WorkerUnavailable(ServiceError):
    """The worker cannot be reached, or the server is not ready."""

    def __init__(self, message: str = "The model worker cannot be reached.") -> None:
        super().__init__(message, code="worker_unavailable", retry_after_s=2)


class StoreUnavailable(ServiceError):
    """The KV store behind the worker did not answer in time, or has lost what the request had there."""

    def __init__(
        self,
        message: str = "The KV store, which this request needs, does not answer or was restarted. Try again, or ask "
        "with the policy 'full', which needs no store.",
    ) -> None:
        super().__init__(message, code=STORE_UNAVAILABLE, retry_after_s=2)


class VersionMismatch(WorkerUnavailable):
    """The worker is of another version; the text names both."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = "version_mismatch"


class RequestTimeout(ServiceError):
    """The request's deadline passed."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(
            f"The request was not finished within {timeout_s:g} s. Ask for fewer tokens, or give it more time: its own "
            "timeout_seconds, or the server's --request-timeout.",
            code="timeout",
        )


class GenerationFailed(ServiceError):
    """The worker gave up on this one request."""

    def __init__(self, message: str = "The generation failed.") -> None:
        super().__init__(message, code="generation_failed")
