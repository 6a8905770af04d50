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
    """A request that cannot be served.

    status: its kind, as a number of HTTP. param: the field that it is about. code: for programs. retry_after_s: when
    another try makes sense.
    """

    status = 500
    param: str | None = None
    code: str | None = None
    retry_after_s: int | None = None

    def __init__(
        self,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = self.param if param is None else param
        self.code = self.code if code is None else code
        self.retry_after_s = self.retry_after_s if retry_after_s is None else retry_after_s


class InvalidRequest(ServiceError):
    """A request field that is missing, of the wrong type or out of range."""

    status = 400


@contextmanager
def invalid_requests() -> Iterator[None]:
    """A LimitError within is raised as an InvalidRequest."""
    try:
        yield
    except LimitError as error:
        raise InvalidRequest(str(error), error.param, error.code) from error


class NoEmbeddings(InvalidRequest):
    """Asked of a model that generates text."""

    param, code = "model", "embeddings_not_supported"

    def __init__(self) -> None:
        super().__init__(
            "This server has no embeddings: its model generates text. Serve an embedding model beside it."
        )


class Unauthorized(ServiceError):
    """No API key, or a wrong one."""

    status, code = 401, "invalid_api_key"

    def __init__(self) -> None:
        super().__init__("Missing or wrong API key. Send it once, as 'Authorization: Bearer KEY'.")


class Forbidden(ServiceError):
    """Something that this server does for nobody, or not for this client."""

    status = 403


class UnknownModel(ServiceError):
    """A model name that is not served."""

    status, param, code = 404, "model", "model_not_found"

    def __init__(self, model: str, served: str) -> None:
        super().__init__(f"The model {_shown(model)} does not exist. This server serves {served!r}.")


class UnknownSession(ServiceError):
    """A session that the caller has not, or no longer."""

    status, param, code = 404, "session_id", "session_not_found"

    def __init__(self, session_id: str) -> None:
        super().__init__(
            f"No session {_shown(session_id)} of this key is held: it was dropped, its room was needed, or the KV "
            "store was restarted. Warm it with POST, or name it as session_id in a request."
        )


class UnknownAttention(ServiceError):
    """A request that the caller does not have, or whose attention is not told."""

    status, param, code = 404, "request_id", "attention_not_found"

    def __init__(self, request_id: str) -> None:
        super().__init__(
            f"No request {_shown(request_id)} of this key tells what it attends: it did not ask with "
            "carrel.attention, has not begun, or ended long ago."
        )


class UnknownResponse(ServiceError):
    """A response that the caller has not, or no longer."""

    status, param, code = 404, "previous_response_id", "previous_response_not_found"

    def __init__(self, response_id: str) -> None:
        super().__init__(
            f"No response {_shown(response_id)} of this key is kept: it was deleted, or made with store false, its "
            "room was needed, or the server was restarted. Send the whole conversation as input."
        )


class TooLarge(ServiceError):
    """A request of too many bytes, or of too many values: reading it would hold up others."""

    status, code = 413, "request_too_large"


class SlowBody(ServiceError):
    """A request body that did not arrive in time."""

    status = 408

    def __init__(self, timeout_s: float) -> None:
        super().__init__(f"The request body did not arrive within {timeout_s:g} s; see --body-timeout.")


class Overloaded(ServiceError):
    """No memory, or no place, for the request now."""

    status, code, retry_after_s = 503, "overloaded", 1


class TooManyRequests(ServiceError):
    """One API key has as much as it may have; the text says of what."""

    status, code, retry_after_s = 429, "too_many_requests", 1


class ShuttingDown(ServiceError):
    """The server is draining and admits nothing new."""

    status, code, retry_after_s = 503, "shutting_down", 5

    def __init__(self) -> None:
        super().__init__("The server is shutting down.")


class WorkerUnavailable(ServiceError):
    """The worker cannot be reached, or the server is not ready."""

    status, code, retry_after_s = 503, "worker_unavailable", 2

    def __init__(self, message: str = "The model worker cannot be reached.") -> None:
        super().__init__(message)


class StoreUnavailable(ServiceError):
    """The KV store behind the worker did not answer in time, or has lost what the request had there."""

    status, code, retry_after_s = 503, STORE_UNAVAILABLE, 2

    def __init__(
        self,
        message: str = "The KV store, which this request needs, does not answer or was restarted. Try again, or ask "
        "with the policy 'full', which needs no store.",
    ) -> None:
        super().__init__(message)


class VersionMismatch(WorkerUnavailable):
    """The worker is of another version; the text names both."""

    code = "version_mismatch"


class RequestTimeout(ServiceError):
    """The request's deadline passed."""

    status, code = 504, "timeout"

    def __init__(self, timeout_s: float) -> None:
        super().__init__(
            f"The request was not finished within {timeout_s:g} s. Ask for fewer tokens, or give it more time: its own "
            "timeout_seconds, or the server's --request-timeout."
        )


class GenerationFailed(ServiceError):
    """The worker gave up on this one request."""

    code = "generation_failed"

    def __init__(self, message: str = "The generation failed.") -> None:
        super().__init__(message)


def _shown(name: str) -> str:
    return repr(name if len(name) <= 100 else name[:100] + "...")
