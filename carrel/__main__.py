"""`python -m carrel` is the `carrel` command."""

from __future__ import annotations

import sys

from carrel.cli import main

if __name__ == "__main__":
    sys.exit(main())
