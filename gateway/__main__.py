"""`python -m gateway`: REST and chat gRPC in front of one worker."""

from __future__ import annotations

import asyncio
import sys

from carrel.process.logs import log_to_stderr
from carrel.process.options import OptionError
from gateway.config import parse_config
from gateway.memory import map_large_pieces
from gateway.server import serve


def main() -> int:
    """0 after draining, 2 when the configuration cannot be used."""
    try:
        config = parse_config(sys.argv[1:])
        log_to_stderr("gateway", config.log_level, config.log_format, hides_error_texts=True)
        map_large_pieces()
        asyncio.run(serve(config))
    except OptionError as error:
        print(f"gateway: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
