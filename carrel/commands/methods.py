"""`carrel methods`: the policies that a worker serves, as a table."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from carrel.methods import read_methods


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--all", action="store_true", help="also variants, wrapped policies and ablations, which have a plus"
    )
    parser.add_argument("--json", action="store_true", help="a JSON object a line instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Raises MethodsError."""
    methods = [method for method in read_methods() if arguments.all or "+" not in method.name]
    if arguments.json:
        for method in methods:
            print(json.dumps(asdict(method)))
        return 0
    table = Table(show_lines=True)
    for heading in ("name", "family", "what it keeps", "paper", "parameters"):
        table.add_column(heading, no_wrap=heading in ("name", "family"))
    for method in methods:
        table.add_row(method.name, method.family, method.keeps, method.paper, ", ".join(method.parameters))
    Console().print(table)
    return 0
