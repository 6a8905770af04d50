"""`python -m kv_store.check`: whether a store could use these options. Ends with 0 or 2, and one line."""

from __future__ import annotations

import sys

from carrel.process.options import OptionError
from kv_store.config import parse_config
from kv_store.memory import check_room


def main() -> int:
    try:
        config = parse_config(sys.argv[1:])
        check_room(config.arena_bytes, config.slab_bytes)
    except OptionError as error:
        print(f"kv_store: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
