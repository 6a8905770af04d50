"""`carrel deploy`: the Serve application of `carrel.cluster`, onto a Ray cluster that runs already."""

from __future__ import annotations

import argparse
import importlib.util
import os
from pathlib import Path
from typing import Any

import yaml

from carrel.cluster.errors import DeployError
from carrel.cluster.manifest import Place, manifest
from carrel.cluster.options import NOT_TAKEN, ClusterOptions, cluster_flags, read_arguments
from carrel.errors import OptionError
from carrel.serve.arguments import add_flag, add_model
from carrel.serve.flags import seconds, tcp_port
from carrel.serve.options import default_of, flags
from gateway.config import is_loopback

OWN = ("address", "host", "port", "name", "proxies", "timeout", "config", "print", "remove")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where to deploy, the cluster's options, and those of `carrel serve` that its processes take."""
    place = parser.add_argument_group("where")
    place.add_argument(
        "--address", metavar="HOST:PORT", help="the Ray cluster (default: RAY_ADDRESS, or this node's)"
    )
    place.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="where Serve's proxies listen")
    place.add_argument(
        "--port", default=8000, type=tcp_port, metavar="N", help="HTTP port of Serve's proxies"
    )
    place.add_argument("--name", default="carrel", help="of the Serve application")
    place.add_argument(
        "--proxies",
        default="HeadOnly",
        choices=("HeadOnly", "EveryNode"),
        help="nodes that take HTTP requests",
    )
    place.add_argument("--timeout", default=3600.0, type=seconds, metavar="S", help="to wait until it serves")
    place.add_argument(
        "--config", type=Path, metavar="FILE", help="YAML file; its keys are the long flags below"
    )
    place.add_argument("--print", action="store_true", help="write the configuration for `serve run` and end")
    place.add_argument("--remove", action="store_true", help="take the application away, after draining")
    add_model(parser, flags()["model"])
    for name, item in cluster_flags().items():
        add_flag(parser, name, item, ClusterOptions.__dataclass_fields__[name].default)
    for name, item in flags().items():
        if name != "model" and name not in NOT_TAKEN:
            add_flag(parser, name, item, default_of(name))


def run(arguments: argparse.Namespace) -> int:
    """0 when the application serves, which it goes on doing. Raises CarrelError."""
    place = Place(arguments.name, arguments.host, arguments.port, arguments.proxies)
    args = application_arguments(arguments)
    options, _ = read_arguments(args)
    if is_loopback(place.host) and not options.allow_open:
        # clients of the proxies are on that machine; a key in the head node's environment is required all the same
        args["allow-open"] = "true"
    if arguments.print:
        print(yaml.safe_dump(manifest(place, args), sort_keys=False), end="")
        return 0
    if importlib.util.find_spec("ray") is None:
        raise DeployError("Ray is not installed: pip install 'carrel[cluster]'")
    # a cluster without tokens lets everyone who reaches it run code
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # imported late: Ray reads these when it is imported
    from carrel.cluster.deployment import deploy, remove

    if arguments.remove:
        remove(arguments.address, place)
        return 0
    deploy(arguments.address, place, args, arguments.timeout)
    return 0


def application_arguments(arguments: argparse.Namespace) -> dict[str, Any]:
    """`args` of the application: the file's, overridden by the command line. Raises OptionError."""
    given = {
        name.replace("_", "-"): text
        for name, text in vars(arguments).items()
        if name in cluster_flags() or (name in flags() and name not in OWN)
    }
    return {**(read_file(arguments.config) if arguments.config else {}), **given}


def read_file(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise OptionError(f"cannot read --config {path}: {exc.strerror}") from exc
    except (UnicodeDecodeError, yaml.YAMLError) as exc:
        raise OptionError(f"--config {path} is not YAML: {str(exc).splitlines()[0]}") from exc
    if not isinstance(content, dict | None):
        raise OptionError(f"--config {path}: expected lines such as `max-replicas: 4`")
    return {str(key): value for key, value in (content or {}).items()}
