"""`python -m gpu_worker.startup MODEL ...`: checks the options of a worker. Ends with 0, or with 2 and one line."""

from __future__ import annotations

import sys

from carrel.process.options import OptionError
from gpu_worker.config import parse_arguments
from gpu_worker.errors import ModelError
from gpu_worker.startup.build import check_options

EXIT_UNUSABLE = 2


def main() -> int:
    try:
        check_options(parse_arguments(sys.argv[1:]))
    except (OptionError, ModelError) as error:
        print(f"gpu_worker: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_UNUSABLE
    return 0


if __name__ == "__main__":
    sys.exit(main())
