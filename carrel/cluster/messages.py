"""The records between a gateway and its replicas."""

from __future__ import annotations

from dataclasses import dataclass

from gpu_worker.v1 import gpu_worker_pb2 as pb


@dataclass(frozen=True, slots=True)
class Failure:
    """How a worker refused or lost a request: a gRPC status by name, and what came with it."""

    status: str
    details: str = ""
    param: str | None = None
    code: str | None = None


@dataclass(frozen=True, slots=True)
class Frame:
    """A piece of a stream: serialised `GenerateResponse` messages of one worker, none in a heartbeat.

    `failure` comes with the last frame of a stream that ended badly.
    """

    replica: str
    events: tuple[bytes, ...] = ()
    is_last: bool = False
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """A replica about itself; `stats` is None while its worker does not answer."""

    replica: str
    node: str
    is_serving: bool
    info: pb.GetInfoResponse | None = None
    stats: pb.StatsResponse | None = None
