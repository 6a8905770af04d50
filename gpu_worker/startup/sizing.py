"""`python -m gpu_worker.startup.sizing MODEL --gpu SIZE ...`: what GPUs of these sizes hold, as one JSON object.

It needs neither weights nor a GPU. Ends with 0, or with 2 and one line.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace

from carrel.process.command_line import Parser
from carrel.process.options import OptionError, num_bytes
from carrel.process.sizing import Card, Held, Sizing
from gpu_worker.config import WorkerConfig, parse_arguments
from gpu_worker.errors import ModelError
from gpu_worker.policies.base import Family
from gpu_worker.policies.registry import SHORT
from gpu_worker.records import Budget
from gpu_worker.runner.workload import Workload
from gpu_worker.startup.build import GPU_SEQS, outline
from gpu_worker.startup.memory import (
    CONTEXT_BYTES,
    UNIT_TOKENS,
    MemoryPlan,
    fits,
    fitting_seats,
    least_bytes,
    least_slot_bytes,
    longest_fitting,
)

EXIT_UNUSABLE = 2
# The shortest context that is counted, and the factor from each to the next.
SHORT_TOKENS, GROWTH = 8192, 4


def size_cards(config: WorkerConfig, cards: Sequence[int], host_bytes: int | None) -> Sizing:
    """Plan a worker with these options for each card.

    cards: bytes of each GPU.
    host_bytes: host memory for caches; None: no limit.

    Raises ConfigError, ModelError.
    """
    model, workload = outline(config)
    weight_bytes = model.num_parameters * workload.dtype.itemsize
    return Sizing(
        dtype=str(workload.dtype).removeprefix("torch."),
        num_parameters=model.num_parameters,
        weight_bytes=weight_bytes,
        token_bytes=_token_bytes(workload),
        max_model_len=workload.shape.max_model_len,
        policy=workload.default_policy,
        budget=_budget_text(workload.default_budget),
        recalls=workload.default.family is Family.RECALL,
        host_bytes=host_bytes,
        cards=tuple(_card(workload, size, weight_bytes, config.max_num_seqs, host_bytes) for size in cards),
    )


def _card(
    workload: Workload, num_bytes: int, weight_bytes: int, asked: int | None, host_bytes: int | None
) -> Card:
    """asked: requests at once; None: as many as the worker chooses."""
    lengths = tuple(_lengths(workload.shape.max_model_len))
    available = num_bytes - CONTEXT_BYTES - weight_bytes
    workload = _seated(workload, available, asked)
    if not fits(workload, available):
        longest = longest_fitting(workload, available)
        if not longest:
            short = workload.of_length(min(UNIT_TOKENS, workload.shape.max_model_len))
            return Card(num_bytes, 0, missing_bytes=least_bytes(short) - available)
        workload = _seated(workload.of_length(longest), available, asked)
    pool = MemoryPlan.of(workload, available).slots
    return Card(
        num_bytes,
        longest=workload.shape.max_model_len,
        seats=workload.shape.max_num_seqs,
        kv_tokens=pool // _token_bytes(workload),
        held=tuple(_held(workload, length, pool, host_bytes) for length in lengths),
    )


def _seated(workload: Workload, available: int, asked: int | None) -> Workload:
    return workload.of_seats(asked or fitting_seats(workload, available, GPU_SEQS))


def _held(workload: Workload, length: int, pool: int, host_bytes: int | None) -> Held:
    """Count requests of this length that share the slots of a worker."""
    family, seats = workload.default.family, workload.shape.max_num_seqs
    if length > workload.shape.max_model_len:
        return Held(length, 0, None if family is Family.DENSE else 0)
    of_length = workload.of_length(length)
    dense = min(seats, pool // least_slot_bytes(replace(of_length, default_policy=SHORT)))
    if family is Family.DENSE:
        return Held(length, dense, None)
    selecting = min(seats, pool // least_slot_bytes(of_length))
    if family is Family.RECALL and host_bytes is not None:
        selecting = min(selecting, host_bytes // (length * _token_bytes(workload)))
    return Held(length, dense, selecting)


def _lengths(longest: int) -> Iterator[int]:
    length = SHORT_TOKENS
    while length < longest:
        yield length
        length *= GROWTH
    yield longest


def _token_bytes(workload: Workload) -> int:
    return workload.shape.num_layers * workload.head_layer_bytes


def _budget_text(budget: Budget) -> str:
    if budget.share is None:
        return f"a budget of {budget.tokens} tokens"
    return f"a budget of {budget.share:g}, at least {budget.least} tokens"


def main(argv: Sequence[str]) -> int:
    try:
        own, rest = _parser().parse_known_args(argv)
        sizing = size_cards(parse_arguments(rest), own.gpu, own.host)
    except (OptionError, ModelError) as error:
        print(f"gpu_worker: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_UNUSABLE
    print(json.dumps(asdict(sizing)))
    return 0


def _parser() -> argparse.ArgumentParser:
    made = Parser(prog="python -m gpu_worker.startup.sizing", add_help=False)
    made.add_argument("--gpu", type=num_bytes, nargs="+", required=True, metavar="SIZE")
    made.add_argument("--host", type=num_bytes, metavar="SIZE")
    return made


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
