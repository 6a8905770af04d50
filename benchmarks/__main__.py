"""`python -m benchmarks NAME ...`: what `carrel bench NAME ...` starts."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from benchmarks.commands import module_of
from benchmarks.errors import BenchmarkError
from carrel.commands.bench import BENCHMARKS
from carrel.process.options import OptionError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark and return its exit code; `argv` leaves out the program's name."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="carrel bench", description=__doc__)
    subparsers = parser.add_subparsers(dest="benchmark", metavar="NAME", required=True)
    for name, summary in BENCHMARKS.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        if name in argv:
            import_module(module_of(name)).add_arguments(subparser)
    options = parser.parse_args(argv)
    options.argv, options.load_average = list(argv), os.getloadavg()[0]
    try:
        return int(import_module(module_of(options.benchmark)).run(options))
    except (BenchmarkError, OptionError) as error:
        print(f"carrel bench {options.benchmark}: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
