"""`carrel deploy`: the Serve application of `carrel.cluster`, onto a Ray cluster that runs already."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, fields
from typing import Literal

import yaml

from carrel.cluster.options import ClusterOptions, Place, manifest
from carrel.machine import require
from carrel.process.command_line import add_options
from carrel.process.options import is_loopback, option
from carrel.process.settings import read


@dataclass(frozen=True, kw_only=True)
class DeployOptions(ClusterOptions):
    """Where to deploy."""

    address: str | None = option(
        None, "the Ray cluster (default: RAY_ADDRESS, or this node's)", metavar="HOST:PORT"
    )
    host: str = option("127.0.0.1", "where Serve's proxies listen", metavar="ADDRESS")
    port: int = option(8000, "HTTP port of Serve's proxies", metavar="N", ge=0, le=65535)
    name: str = option("carrel", "of the Serve application", metavar="NAME")
    proxies: Literal["HeadOnly", "EveryNode"] = option(
        "HeadOnly", "nodes that take HTTP requests: HeadOnly or EveryNode", metavar="NODES"
    )
    timeout_s: float = option(
        3600.0,
        "seconds to wait until it serves, or is gone",
        name="timeout",
        metavar="S",
        ge=0,
        allow_inf_nan=False,
    )
    print: bool = option(False, "write the configuration for `serve run` and end")
    remove: bool = option(False, "take the application away, after draining")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, DeployOptions, has_variables=False)


def run(arguments: argparse.Namespace) -> int:
    """0 when the application serves, which it goes on doing. Raises CarrelError and OptionError."""
    resolved = read(DeployOptions, vars(arguments), has_variables=False)
    options = resolved.options
    place = Place(options.name, options.host, options.port, options.proxies)
    known = {item.name for item in fields(ClusterOptions)}
    args = {each.option.name: each.text for field, each in resolved.given.items() if field in known}
    if is_loopback(place.host) and not options.allow_open:
        # clients of the proxies are on that machine; a key in the head node's environment is required all the same
        args["allow-open"] = "true"
    if options.print:
        print(yaml.safe_dump(manifest(place, args), sort_keys=False), end="")
        return 0
    require("deploy", ("ray",), "'carrel[cluster]'")
    # a cluster without tokens lets everyone who reaches it run code
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # imported late: Ray reads these when it is imported
    from carrel.cluster.deployment import deploy, remove

    if options.remove:
        remove(options.address, place, options.timeout_s)
        return 0
    deploy(options.address, place, args, options.timeout_s)
    return 0
