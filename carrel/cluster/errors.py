"""Errors of the cluster's processes."""

from __future__ import annotations

from carrel.errors import CarrelError
from gateway.errors import WorkerUnavailable


class ReplicaStartError(CarrelError):
    """A replica's store or worker did not come to serve; the text has the last lines it wrote."""


class ReplicaLost(WorkerUnavailable):
    """A replica went away, or its worker, with what it ran. `replica` is empty while none had the request."""

    def __init__(self, replica: str) -> None:
        super().__init__("The replica that ran this request was lost.")
        self.replica = replica
