"""The records between a gateway and its replicas, and the error where one is gone."""

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


class ReplicaLost(Exception):
    """A replica went away, or its worker, with what it ran. `replica` is empty where its name is not known.

    Never leaves the cluster's client, which tries elsewhere or says `WorkerUnavailable`.
    """

    def __init__(self, replica: str = "") -> None:
        super().__init__(replica)
        self.replica = replica
