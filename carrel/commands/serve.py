"""`carrel serve`: store, worker and gateway on this machine, started, watched and ended together."""

from __future__ import annotations

import argparse
import os
from contextlib import ExitStack
from dataclasses import replace

from rich.console import Console

from carrel.process.version import commit, version
from carrel.serve.arguments import add_flag, add_model
from carrel.serve.banner import banner, ready_lines
from carrel.serve.children import Endpoints, check_gateway, child_environment, child_specs
from carrel.serve.display import create_display
from carrel.serve.facts import gather_facts
from carrel.serve.memory import default_arena_bytes
from carrel.serve.model import find_model
from carrel.serve.options import default_of, flags
from carrel.serve.ports import held_port
from carrel.serve.resolve import CONFIG_KEY, resolve
from carrel.serve.restarts import RestartPolicy
from carrel.serve.runtime_dir import runtime_dir
from carrel.serve.supervisor import Supervisor

VERBOSE_LEVELS = ("debug", "info")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Every option by its long flag; absent ones stay absent, so that the layers below them count."""
    parser.epilog = "What is named twice: command line over CARREL_* variables over --config over default."
    add_model(parser, flags()["model"])
    for name, item in flags().items():
        if name != "model":
            add_flag(parser, name, item, default_of(name))
    parser.add_argument(
        f"--{CONFIG_KEY}",
        metavar="FILE",
        help="YAML file; its keys are the long flags without dashes",
        default=argparse.SUPPRESS,
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal comes. Returns 0 after draining; raises CarrelError otherwise."""
    known = {*flags(), CONFIG_KEY}
    given = {name: text for name, text in vars(arguments).items() if name in known and text is not None}
    resolved = resolve(given, os.environ)
    options = resolved.options
    model = find_model(options.model)
    if options.arena_bytes is None:
        options = replace(options, arena_bytes=default_arena_bytes())
    environment = child_environment(os.environ)
    display = create_display(Console(), options.log_level in VERBOSE_LEVELS, Console(stderr=True))

    with ExitStack() as stack:
        port = stack.enter_context(held_port(options.host, options.port, "--port"))
        grpc_port = 0
        if options.grpc_port:
            grpc_port = stack.enter_context(held_port(options.host, options.grpc_port, "--grpc-port"))
        path = stack.enter_context(runtime_dir())
        endpoints = Endpoints(path, options.host, port, grpc_port)

        def show_banner() -> None:
            facts = gather_facts(endpoints, options.api_key)
            display.show(banner(facts, resolved.non_default(), version(), commit()))
            for line in ready_lines(facts, endpoints, needs_key=options.api_key is not None):
                display.message(line)

        specs = child_specs(model, options, endpoints)
        check_gateway(specs, environment)
        supervisor = Supervisor(display, environment, str(path), RestartPolicy(options.restarts))
        return supervisor.run(specs, show_banner)
