"""All replicas as one gateway sees them, through a Serve handle."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from contextvars import Context
from typing import Any

import ray.exceptions
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle

from carrel.cluster.messages import Failure, Frame, ReplicaLost, Report
from gateway.errors import GenerationFailed, Overloaded

# Of a replica's reply to a short call: one that computes on all cores may need more than a second for it.
REPLY_TIMEOUT_S = 5.0
_OF_RAY = (ray.exceptions.RayError, RayServeException, DeploymentUnavailableError, BackPressureError)


class Fleet:
    """The replicas of a Serve deployment. Every method raises ReplicaLost and ServiceErrors only."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._generate = handle.options(method_name="generate", stream=True)
        self._abort = handle.options(method_name="abort")
        self._handle = handle

    async def generate(
        self,
        request: bytes,
        timeout_s: float,
        wanted: str,
        lost: tuple[str, ...],
        metadata: Sequence[tuple[str, str]] = (),
    ) -> AsyncGenerator[Frame, None]:
        """The frames of one request: `wanted` takes it if it is there, and a replica in `lost` only if no other can.
        metadata: of the call to the replica's worker.

        Closing it ends the request. Raises Overloaded when Serve itself has no room.
        """
        # Any: the handle's options decide what its calls return
        response: Any = _called(
            self._generate, request, timeout_s=timeout_s, wanted=wanted, lost=lost, metadata=tuple(metadata)
        )
        last: Frame | None = None
        try:
            with _translated():
                async for frame in response:
                    if frame.is_last:
                        # held until the call has ended, so that a reader that stops does not cancel it
                        last = frame
                    else:
                        yield frame
        except ReplicaLost:
            if last is None:
                raise
        finally:
            # no effect on what has ended, but to tell once more how that ended
            with contextlib.suppress(*_OF_RAY):
                response.cancel()
        if last is not None:
            yield last

    async def abort(self, replica: str, request_id: str) -> None:
        """End a request on a replica; its stream still ends with its usage."""
        with _translated():
            await _called(self._abort, request_id, only=replica)

    async def ask_all(self, method: str, request: bytes) -> tuple[bytes | Failure, ...]:
        """The reply of each replica's worker to a short call. Raises ReplicaLost when they do not arrive in time."""
        answers = await self._broadcast(REPLY_TIMEOUT_S, "ask", method, request)
        return tuple(answer for answer in answers if type(answer) in (bytes, Failure))

    async def reports(self) -> tuple[Report, ...]:
        """The report of each replica that answers. Raises ReplicaLost when they do not arrive in time."""
        answers = await self._broadcast(REPLY_TIMEOUT_S, "report")
        return tuple(answer for answer in answers if type(answer) is Report)

    async def _broadcast(self, timeout_s: float, method: str, *arguments: Any) -> Sequence[Any]:
        """Call every replica, and return each one's result or exception."""
        with _translated():
            try:
                return await self._handle.broadcast(method, *arguments).results_async(
                    timeout_s=timeout_s, return_exceptions=True
                )
            except TimeoutError as exc:
                raise ReplicaLost from exc
            except DeploymentUnavailableError:
                return ()


def _called(method: DeploymentHandle[Any], *arguments: Any, **named: Any) -> Any:
    """The response to a call that begins now.

    It has a context of its own. In that of an HTTP request all calls would have one id, by which Serve's routers
    know what waits for a replica: of the choices of a request that wait at once, all but one would wait for ever.
    """
    return Context().run(method.remote, *arguments, **named)


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except BackPressureError as exc:
        raise Overloaded("The replicas have no room.") from exc
    except ray.exceptions.RayTaskError as exc:
        # a bug of ours: its text may hold anything
        raise GenerationFailed() from exc
    except _OF_RAY as exc:
        raise ReplicaLost from exc
