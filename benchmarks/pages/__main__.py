"""`python -m benchmarks.pages [--check]`: writes every table between markers, or says which have drifted."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.pages.catalog import TABLES
from benchmarks.pages.page import PageError, fill
from carrel.process.version import CHECKOUT


def pages(root: Path = CHECKOUT) -> list[Path]:
    """README.md and every page of docs/."""
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pages", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a page would change")
    options = parser.parse_args(argv)
    drifted = []
    for page in pages():
        old = page.read_text()
        try:
            new = fill(old, TABLES)
        except PageError as error:
            print(f"{page.name}: {error}", file=sys.stderr)
            return 2
        if new == old:
            continue
        drifted.append(page.name)
        if not options.check:
            page.write_text(new)
    if drifted:
        what = "differ from benchmarks/results; run `make docs`" if options.check else "written"
        print(f"{', '.join(drifted)}: {what}")
    return int(options.check and bool(drifted))


if __name__ == "__main__":
    sys.exit(main())
