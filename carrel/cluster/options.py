"""The options of a cluster: its own, and those of `carrel serve` that its processes take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from carrel.errors import OptionError
from carrel.serve.flags import GATEWAY, Flag, flag, positive_int, true_or_false
from carrel.serve.model import find_model
from carrel.serve.options import ServeOptions, child_arguments
from carrel.serve.resolve import parse_option, spellings
from gateway.config import GatewayConfig, parse_config
from gateway.errors import ConfigError

# Serve's proxies listen for these, a secret must not stand in Serve's configuration, and Serve restarts what dies
NOT_TAKEN = {
    "host": "set http_options.host of the Serve configuration, and grpc-host",
    "port": "set http_options.port of the Serve configuration",
    "api_key": "set CARREL_API_KEY in the environment of the head node: Serve shows its configuration to everyone",
    "restarts": "Serve starts a replica that dies again, without a limit",
}


def amount(text: str) -> float:
    number = float(text)
    if not 0 <= number < float("inf"):
        raise ValueError("expected a number from 0 up")
    return number


@dataclass(frozen=True)
class ClusterOptions:
    """What a cluster has beside the options of one machine. Amounts are Ray's: what a node is asked for."""

    min_replicas: int = flag(1, "replicas that always run", positive_int, metavar="N")
    max_replicas: int | None = flag(
        None, "replicas at most, under load (default: no more than always)", positive_int, metavar="N"
    )
    target_requests: int = flag(
        8,
        "requests of a replica, running and waiting, above which there should be another",
        positive_int,
        metavar="N",
    )
    max_requests: int = flag(
        32,
        "requests of a replica, running and waiting, at most; more are refused with 503",
        positive_int,
        metavar="N",
    )
    max_concurrent: int = flag(256, "requests that the gateway serves at once", positive_int, metavar="N")
    gpus: float = flag(0.0, "GPUs of a replica; 0: it computes on the CPU", amount, metavar="N")
    cpus: float = flag(1.0, "cores of a replica's worker", amount, metavar="N")
    store_cpus: float = flag(
        1.0, "cores of a replica's store, which trains indexes on them", amount, metavar="N"
    )
    affinity: bool = flag(
        True, "send prompts that begin alike to one replica: true or false", true_or_false, metavar="WORD"
    )
    grpc_host: str = flag("127.0.0.1", "address of chat gRPC, on the gateway's node", metavar="ADDRESS")

    def __post_init__(self) -> None:
        if self.max_replicas is not None and self.max_replicas < self.min_replicas:
            raise OptionError(
                f"max-replicas {self.max_replicas} is below min-replicas {self.min_replicas}: raise the first"
            )

    @property
    def most_replicas(self) -> int:
        return self.max_replicas or self.min_replicas


def cluster_flags() -> dict[str, Flag]:
    """Every option's `Flag` by its field name."""
    return {item.name: item.metadata["flag"] for item in fields(ClusterOptions)}


def read_arguments(arguments: Mapping[str, Any]) -> tuple[ServeOptions, ClusterOptions]:
    """The options in `args` of a Serve application: long flags without dashes, as in `carrel serve --config`.

    Raises OptionError that names the key: an unknown one, one not taken here, a value that cannot be read.
    """
    known = cluster_flags()
    serve_values: dict[str, Any] = {}
    cluster_values: dict[str, Any] = {}
    for key, value in arguments.items():
        name = str(key).replace("-", "_")
        spelled = f"args: {key}"
        if isinstance(value, dict | list | None):
            raise OptionError(f"{spelled} needs one value")
        if name in known:
            cluster_values[name] = parse_option(known[name], spelled, str(value))
        elif name not in spellings():
            listed = ", ".join(sorted(each.replace("_", "-") for each in (*known, *spellings())))
            raise OptionError(f"{spelled}: unknown option; known ones: {listed}")
        elif spellings()[name] in NOT_TAKEN:
            raise OptionError(f"{spelled}: not an option of a cluster: {NOT_TAKEN[spellings()[name]]}")
        else:
            field = spellings()[name]
            serve_values[field] = parse_option(
                ServeOptions.__dataclass_fields__[field].metadata["flag"], spelled, str(value)
            )
    return ServeOptions(**serve_values), ClusterOptions(**cluster_values)


def gateway_config(
    options: ServeOptions, cluster: ClusterOptions, environment: Mapping[str, str]
) -> GatewayConfig:
    """The gateway's configuration; keys come from CARREL_API_KEY of its node's `environment`.

    Raises OptionError when there is no key and the API was not opened explicitly: Serve's proxies decide where they
    listen, so no address makes that safe here.
    """
    arguments = [
        *("--model", find_model(options.model), "--worker", "cluster", "--host", cluster.grpc_host),
        *(
            "--grpc-port",
            str(options.grpc_port),
            "--port",
            "0",
            "--max-concurrent",
            str(cluster.max_concurrent),
        ),
        *child_arguments(replace(options, host=cluster.grpc_host), GATEWAY),
    ]
    try:
        config = parse_config(arguments, environment)
    except ConfigError as exc:
        raise OptionError(str(exc)) from exc
    if not config.api_keys and not config.is_open_allowed:
        raise OptionError(
            "no API key: set CARREL_API_KEY in the environment of the head node before `ray start`, or set "
            "allow-open to serve everyone who reaches Serve's proxies"
        )
    return config
