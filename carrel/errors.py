"""Errors of the `carrel` command. Each ends it with its own exit code and one line on stderr."""

from __future__ import annotations

from carrel.process.options import OptionError


class CarrelError(Exception):
    """Something the user should read in one line; never shown with a traceback."""

    exit_code = 1


class PortInUseError(OptionError):
    def __init__(self, host: str, port: int, flag: str, reason: str) -> None:
        super().__init__(f"cannot listen on {host}:{port}: {reason}; choose another with {flag}")


class ModelNotFoundError(OptionError):
    """The model to serve is not there."""


class ChildError(CarrelError):
    """A process of `carrel serve` ended or did not become ready.

    `lines` are the last it wrote to stderr. Unusable configuration ends a child with 2, and so us.
    """

    def __init__(self, message: str, lines: tuple[str, ...] = (), exit_code: int = 1) -> None:
        super().__init__(message)
        self.lines = lines
        self.exit_code = exit_code


class ChatError(CarrelError):
    """The server cannot be reached or refused a request."""


class EvaluationError(CarrelError):
    """An evaluation cannot run, or cannot be continued."""


class ReplicaStartError(CarrelError):
    """A replica's store or worker did not start serving; the text has the last lines it wrote."""


class DeployError(CarrelError):
    """The cluster cannot be reached, or what was deployed does not serve."""
