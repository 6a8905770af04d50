"""Figures that tests of minutes print for the pages; `make faults ARGS=-s` shows them."""

from __future__ import annotations

import json
import time


def tell(what: str, **figures: object) -> None:
    print(json.dumps({"what": what, **figures}))


def since(begin: float) -> float:
    return round(time.monotonic() - begin, 1)
