"""The commands by name. Each is a module with `add_arguments(parser)` and `run(arguments) -> exit code`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """`module` is imported only when the command is used, so that none pays for another's libraries."""

    module: str
    summary: str


COMMANDS = {
    "serve": Command("carrel.commands.serve", "Serve a model on this machine."),
    "deploy": Command("carrel.commands.deploy", "Serve a model on a running Ray cluster."),
    "chat": Command("carrel.commands.chat", "Talk to a running server in the terminal."),
    "eval": Command("carrel.commands.eval", "Measure the policies' answer quality against dense attention."),
    "bench": Command(
        "carrel.commands.bench", "Measure speed: kernels, decoding, prefill, or a running server."
    ),
    "calibrate": Command(
        "carrel.commands.calibrate", "Measure on texts what some policies must know of a model."
    ),
    "plan": Command("carrel.commands.plan", "Plan memory: which contexts and how many requests a GPU holds."),
    "methods": Command(
        "carrel.commands.methods", "List the policies, or show one with its options and its paper."
    ),
    "doctor": Command("carrel.commands.doctor", "Check what a start needs, and say what to change."),
    "collect-env": Command("carrel.commands.collect_env", "Tell what a report of a problem needs."),
    "version": Command("carrel.commands.version", "Show the version and commit."),
}
