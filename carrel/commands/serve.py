"""`carrel serve`: store, worker and gateway on this machine, started, watched and ended together."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import ExitStack

from rich.console import Console

from carrel.process.command_line import add_options
from carrel.process.log_lines import is_json
from carrel.process.settings import Resolved, ignored_variables, read
from carrel.process.version import commit, version
from carrel.serve.banner import banner, gather_facts, ready_lines
from carrel.serve.children import check_specs, child_environment, child_specs, served_name
from carrel.serve.display import Display
from carrel.serve.endpoints import Endpoints, held_next_port, held_port, runtime_dir
from carrel.serve.model import check_hub_model, find_model
from carrel.serve.one_shot import run_checks
from carrel.serve.options import ServeOptions
from carrel.serve.restarts import RestartPolicy
from carrel.serve.slab_size import default_slab_bytes
from carrel.serve.supervisor import Supervisor

VERBOSE_LEVELS = ("debug", "info")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, ServeOptions)


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal comes. Returns 0 after draining; raises CarrelError and OptionError otherwise."""
    resolved = read(ServeOptions, vars(arguments))
    options = resolved.options
    model = find_model(options.model)
    check_hub_model(model, options.revision)
    environment = child_environment(os.environ)
    as_json = is_json(options.log_format, sys.stdout)
    display = Display(Console(), options.log_level in VERBOSE_LEVELS, Console(stderr=True), as_json)

    for line in ignored_variables(ServeOptions, os.environ):
        display.message(f"warning: {line}")
    with ExitStack() as stack:
        port, grpc_port = _hold_ports(resolved, stack)
        path = stack.enter_context(runtime_dir())
        has_tls = options.ssl_certfile is not None
        endpoints = Endpoints(path, options.host, port, grpc_port, options.uds, has_tls)

        slab_bytes = str(default_slab_bytes(model, options.revision))
        texts = {"slab_bytes": slab_bytes, **resolved.texts, "log_format": "json" if as_json else "text"}
        specs = child_specs(model, texts, endpoints)

        def show_banner() -> None:
            facts = gather_facts(endpoints, served_name(model, texts))
            display.show(banner(facts, resolved.shown(), version(), commit()))
            for line in ready_lines(facts, endpoints, bool(options.all_keys), not options.disable_docs):
                display.message(line)

        run_checks(check_specs(specs), environment)
        supervisor = Supervisor(display, environment, RestartPolicy(options.restarts))
        return supervisor.run(specs, show_banner)


def _hold_ports(resolved: Resolved[ServeOptions], stack: ExitStack) -> tuple[int, int]:
    """The ports of HTTP and gRPC, 0 where there is none; a port of gRPC that was not given follows that of HTTP.

    Raises PortInUseError.
    """
    options, port = resolved.options, 0
    if options.uds is None:
        port = stack.enter_context(held_port(options.host, options.port, "--port"))
        if "port" in resolved.given and "grpc_port" not in resolved.given:
            # a second server on this machine needs no second option
            return port, stack.enter_context(held_next_port(options.host, port, "--grpc-port"))
    if not options.grpc_port:
        return port, 0
    return port, stack.enter_context(held_port(options.host, options.grpc_port, "--grpc-port"))
