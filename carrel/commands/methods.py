"""`carrel methods`: the policies that a worker serves, as a list, or one with its options."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from carrel.methods import PolicySummary, read_methods
from carrel.process.options import OptionError
from carrel.process.policy_names import choices


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="show this policy, with its options")
    parser.add_argument(
        "--all", action="store_true", help="also variants, wrapped policies and ablations, which have a plus"
    )
    parser.add_argument("--json", action="store_true", help="a JSON object a line instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Raises MethodsError, and OptionError for a name that no policy has."""
    known = read_methods()
    if arguments.name:
        methods = [_named(arguments.name, known)]
    else:
        methods = [method for method in known if arguments.all or "+" not in method.name]
    if arguments.json:
        for method in methods:
            print(json.dumps(asdict(method)))
    elif arguments.name:
        _show(methods[0], known, Console())
    else:
        _list(methods, Console())
    return 0


def _named(name: str, known: Sequence[PolicySummary]) -> PolicySummary:
    """Raises OptionError."""
    by_name = {method.name: method for method in known}
    if name not in by_name:
        raise OptionError(f"unknown policy {name!r}; {choices(name, by_name)}")
    return by_name[name]


def _list(methods: Sequence[PolicySummary], console: Console) -> None:
    """A line each on 80 columns, where no wrapped forms are among them."""
    table = Table(box=None, pad_edge=False)
    for heading in ("name", "family", "what it keeps"):
        table.add_column(heading, no_wrap=heading != "what it keeps")
    for method in methods:
        table.add_row(method.name, method.family, method.keeps)
    console.print(table)
    console.print("\n`carrel methods NAME` shows the options of one.", highlight=False)


def _show(method: PolicySummary, known: Sequence[PolicySummary], console: Console) -> None:
    forms = [other.name for other in known if other.name.startswith(f"{method.name}+")]
    facts = Table.grid(padding=(0, 2))
    for label, text in (
        ("name", method.name),
        ("family", method.family),
        ("keeps", method.keeps),
        ("paper", method.paper),
        ("other forms", ", ".join(forms)),
    ):
        if text:
            facts.add_row(label, escape(text))
    console.print(facts, highlight=False)
    if method.parameters:
        console.print(_options(method.parameters))
    # fields of another form are set at its method or at its wrapper
    if method.parameters and "+" not in method.name:
        console.print(f"\n--policy-options {method.name}:FIELD=VALUE sets a field.", highlight=False)


def _options(parameters: Sequence[str]) -> Table:
    """parameters: such as "num_sink=4 (1 to 64)", without a range where the name of the policy decides."""
    table = Table(box=None, pad_edge=False)
    for heading in ("\nfield", "\ndefault", "\nrange"):
        table.add_column(heading)
    for parameter in parameters:
        field, _, rest = parameter.partition("=")
        default, _, values = rest.partition(" (")
        table.add_row(field, escape(default), escape(values.removesuffix(")")) or "not an option")
    return table
