"""The options of `carrel serve`: those of its three processes, and its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from carrel.process.log_lines import LogFormat
from carrel.process.options import option
from carrel.process.tracing import OTLP_HELP
from carrel.serve.restarts import DEFAULT_LIMIT
from gateway.config import GatewayOptions, ListenOptions
from gpu_worker.config import WorkerOptions
from kv_store.config import StoreOptions


@dataclass(frozen=True, kw_only=True)
class ServeOptions(ListenOptions, GatewayOptions, WorkerOptions, StoreOptions):
    """All three processes."""

    starts_all: ClassVar[bool] = True

    model: str | None = option(
        None,
        "model directory, GGUF file or Hugging Face id (default: the bundled carrel-nano)",
        positional=True,
        metavar="MODEL",
    )
    restarts: int = option(
        DEFAULT_LIMIT,
        "times within 10 minutes that a process which dies is started again; 0: its death ends everything",
        metavar="N",
        ge=0,
    )
    log_level: Literal["debug", "info", "warning", "error"] = option(
        "warning",
        "of all three: debug, info, warning or error; with the first two, lines of loading processes are shown",
        metavar="LEVEL",
    )
    log_format: LogFormat = option(
        "auto",
        "of all three, and of what carrel serve says: json, an object a line, with ids of request and trace; text; or "
        "auto: text on a terminal",
        metavar="FORMAT",
    )
    otlp_endpoint: str | None = option(None, OTLP_HELP, metavar="URL")
