"""The options of a cluster: its own, and those of `carrel serve` that its processes take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from carrel.process.options import OptionError, option
from carrel.process.settings import Resolved, resolve
from carrel.serve.model import find_model
from gateway.auth import api_keys
from gateway.config import GatewayConfig, GatewayOptions
from gpu_worker.config import WorkerOptions
from kv_store.config import StoreOptions

# Serve's proxies listen for these, a secret must not stand in Serve's configuration, and Serve restarts what dies
NOT_TAKEN = {
    "host": "set http_options.host of the Serve configuration, and grpc-host",
    "port": "set http_options.port of the Serve configuration",
    "api-key": "set CARREL_API_KEY in the environment of the head node: Serve shows its configuration to everyone",
    "restarts": "Serve starts a replica that dies again, without a limit",
}


@dataclass(frozen=True, kw_only=True)
class ClusterOptions(GatewayOptions, WorkerOptions, StoreOptions):
    """The cluster. Amounts are Ray's: what a node is asked for."""

    starts_all: ClassVar[bool] = True

    model: str | None = option(
        None,
        "model directory, GGUF file or Hugging Face id (default: the bundled carrel-nano)",
        positional=True,
        metavar="MODEL",
    )
    min_replicas: int = option(1, "replicas that always run", metavar="N", ge=1)
    max_replicas: int | None = option(
        None, "replicas at most, under load (default: no more than always)", metavar="N", ge=1
    )
    target_requests: int = option(
        8,
        "requests of a replica, running and waiting, above which there should be another",
        metavar="N",
        ge=1,
    )
    max_requests: int = option(
        32,
        "requests of a replica, running and waiting, at most; more are refused with 503",
        metavar="N",
        ge=1,
    )
    gpus: float = option(
        0.0, "GPUs of a replica; 0: it computes on the CPU", metavar="N", ge=0, allow_inf_nan=False
    )
    cpus: float = option(1.0, "cores of a replica's worker", metavar="N", ge=0, allow_inf_nan=False)
    store_cpus: float = option(
        1.0,
        "cores of a replica's store, which trains indexes on them",
        metavar="N",
        ge=0,
        allow_inf_nan=False,
    )
    affinity: bool = option(True, "send prompts that begin alike to one replica")
    grpc_host: str = option("127.0.0.1", "address of chat gRPC, on the gateway's node", metavar="ADDRESS")

    def __post_init__(self) -> None:
        if self.max_replicas is not None and self.max_replicas < self.min_replicas:
            raise OptionError(
                f"--max-replicas {self.max_replicas} is below --min-replicas {self.min_replicas}: raise the first"
            )

    @property
    def most_replicas(self) -> int:
        return self.max_replicas or self.min_replicas


def read_arguments(arguments: Mapping[str, Any]) -> Resolved[ClusterOptions]:
    """The options in `args` of a Serve application: long flags without dashes, as in `carrel serve --config`.

    Raises OptionError that names the key: an unknown one, one not taken here, a value that cannot be read.
    """
    for key in arguments:
        if (reason := NOT_TAKEN.get(str(key).replace("_", "-"))) is not None:
            raise OptionError(f"{key} (args): not an option of a cluster: {reason}")
    return resolve(ClusterOptions, {"args": {str(key): value for key, value in arguments.items()}})


def gateway_config(options: ClusterOptions, environment: Mapping[str, str]) -> GatewayConfig:
    """The gateway's configuration; keys come from CARREL_API_KEY of its node's `environment`.

    Raises OptionError when there is no key and the API was not opened explicitly: Serve's proxies decide where they
    listen, so no address makes that safe here.
    """
    text = environment.get("CARREL_API_KEY", "")
    try:
        keys = api_keys(text) if text else ()
    except ValueError as exc:
        raise OptionError(f"CARREL_API_KEY {exc}") from exc
    if not keys and not options.allow_open:
        raise OptionError(
            "no API key: set CARREL_API_KEY in the environment of the head node before `ray start`, or set "
            "--allow-open to serve everyone who reaches Serve's proxies"
        )
    shared: dict[str, Any] = {item.name: getattr(options, item.name) for item in fields(GatewayOptions)}
    return GatewayConfig(
        **shared,
        model=find_model(options.model),
        worker="unix:cluster",
        host=options.grpc_host,
        port=0,
        api_keys=keys,
        no_warmup=options.no_warmup,
    )


BUILDER = "carrel.cluster.app:build"


@dataclass(frozen=True)
class Place:
    """The application's name, and where Serve's proxies listen for it."""

    name: str
    host: str
    port: int
    proxies: str


def manifest(place: Place, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents of a file that `ray.serve.schema.ServeDeploySchema` reads."""
    return {
        "proxy_location": place.proxies,
        "http_options": {"host": place.host, "port": place.port},
        "applications": [
            {"name": place.name, "route_prefix": "/", "import_path": BUILDER, "args": dict(arguments)}
        ],
    }
