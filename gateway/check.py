"""`python -m gateway.check`: whether a gateway could use these options. Ends with 0 or 2, and one line."""

from __future__ import annotations

import sys

from carrel.process.options import OptionError
from gateway.config import parse_config
from gateway.server import load


def main() -> int:
    try:
        load(parse_config(sys.argv[1:]))
    except OptionError as error:
        print(f"gateway: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
