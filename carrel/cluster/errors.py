"""Errors of the cluster's processes."""

from __future__ import annotations

from carrel.errors import CarrelError


class ReplicaStartError(CarrelError):
    """A replica's store or worker did not start serving; the text has the last lines it wrote."""


class ReplicaLost(Exception):
    """A replica went away, or its worker, with what it ran. `replica` is empty where its name is not known.

    Never leaves the cluster's client, which tries elsewhere or says `WorkerUnavailable`.
    """

    def __init__(self, replica: str = "") -> None:
        super().__init__(replica)
        self.replica = replica


class DeployError(CarrelError):
    """The cluster cannot be reached, or what was deployed does not serve."""
