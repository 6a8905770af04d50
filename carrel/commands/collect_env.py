"""`carrel collect-env`: what to paste into a report of a problem."""

from __future__ import annotations

import argparse
import json
import os

from carrel.environment import describe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file of options, as carrel serve would read it"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def run(arguments: argparse.Namespace) -> int:
    found = describe(arguments.config, os.environ)
    if arguments.json:
        print(json.dumps(found, indent=2))
        return 0
    for heading, rows in found.items():
        print(f"{heading}:")
        for name, text in rows.items():
            print(f"  {name}: {text}")
        if not rows:
            print("  none")
    return 0
