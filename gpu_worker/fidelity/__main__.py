"""`python -m gpu_worker.fidelity MODEL ... --job FILE --out FILE`: measures a job, a line for each result."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from carrel.process.command_line import Parser
from carrel.process.events import ProcessEvents
from carrel.process.logs import log_to_stderr
from carrel.process.options import OptionError
from gpu_worker.__main__ import EXIT_UNUSABLE, available_cores
from gpu_worker.config import parse_arguments
from gpu_worker.errors import ModelError, StoreUnavailable
from gpu_worker.fidelity import Fidelity, read_job
from gpu_worker.service.store_wait import wait_for_store
from gpu_worker.startup.build import build_engine


def main(argv: Sequence[str]) -> int:
    """Returns the exit status: 0, or 2 with one line on stderr for what cannot be used."""
    begun = time.monotonic()
    try:
        own, rest = _parser().parse_known_args(argv)
        config = parse_arguments(rest)
        log_to_stderr("gpu_worker", config.log_level, config.log_format)
        events = ProcessEvents("gpu_worker", config.json_events)
        job = read_job(own.job)
        wait_for_store(config.store, config.store_timeout_s, config.store_token, config.store_root)
        torch.set_num_threads(config.threads or available_cores())
        worker = build_engine(config, events.progress)
    except (OptionError, ModelError, StoreUnavailable) as error:
        print(f"gpu_worker: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_UNUSABLE
    total, done = len(job.documents) * (1 + len(job.settings)), 0
    fidelity = Fidelity(worker, job, lambda: time.monotonic() - begun > own.limit_seconds)
    try:
        with own.out.open("w") as out:
            for found in fidelity.run():
                out.writelines(f"{json.dumps(asdict(each))}\n" for each in found)
                out.flush()
                done += len(found)
                events.progress(f"{found[0].policy}", done, total)
    finally:
        worker.engine.close()
    return 0


def _parser() -> Parser:
    made = Parser(
        prog="python -m gpu_worker.fidelity", add_help=False, description="What `carrel eval` starts."
    )
    made.add_argument("--job", type=Path, required=True, metavar="FILE")
    made.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="JSON, a document and policy a line"
    )
    made.add_argument("--limit-seconds", type=float, default=float("inf"), metavar="S")
    return made


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
