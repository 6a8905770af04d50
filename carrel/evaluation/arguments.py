"""The options of `carrel eval`."""

from __future__ import annotations

import argparse
from pathlib import Path

from carrel.evaluation.cells import PROTOCOLS
from carrel.evaluation.fact_suite import FACT_TASKS
from carrel.evaluation.tasks import GROUPS, TEXT_TASKS
from carrel.process.command_line import at_least, budget, new_file
from carrel.process.options import options_of
from carrel.serve.options import ServeOptions
from gpu_worker.config import StudyOptions

# Options of the store and the worker, with the defaults that measuring wants.
OWN = dict.fromkeys(
    (
        "dtype",
        "max_num_seqs",
        "threads",
        "slot_memory_bytes",
        "arena_bytes",
        "slab_bytes",
        "index_device",
        "calibration",
        "full_layers",
        "granularity",
        "policy_options",
        "num_trainers",
    )
) | {"device": "auto", "hot_cache": "0.25", "prefix_cache": None}
TASKS = (*FACT_TASKS, *TEXT_TASKS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Lengths count prompt and answer together. docs/evaluation.md says how to read the table."
    parser.add_argument("--model", metavar="MODEL", help="as for carrel serve (default: carrel-nano)")
    parser.add_argument(
        "--books",
        type=Path,
        metavar="DIR",
        help="folder that holds heldout/*.txt.xz; mixed and needle need it, or --text-dir",
    )
    parser.add_argument(
        "--text-dir",
        type=Path,
        metavar="DIR",
        help="folder of *.txt or *.txt.xz for haystacks (default: those of --books; without, sentences are invented)",
    )
    parser.add_argument(
        "--tasks",
        nargs="+",
        type=_task,
        default=["mixed"],
        metavar="TASK",
        help=f"{', '.join(TASKS)}; or {' and '.join(GROUPS)}, which stand for several; the first two are "
        "carrel-nano's (default: mixed)",
    )
    parser.add_argument(
        "--fidelity",
        action="store_true",
        help="no tasks: perplexity of texts through decode steps, and the distance to full",
    )
    parser.add_argument(
        "--forced",
        type=at_least(2),
        default=128,
        metavar="N",
        help="of --fidelity: last tokens of a text, which are forced through decode steps (default: 128)",
    )
    parser.add_argument(
        "--generate",
        type=at_least(0),
        default=32,
        metavar="N",
        help="of --fidelity: tokens generated until one differs from full's (default: 32)",
    )
    parser.add_argument(
        "--chat", action="store_true", help="ask in the model's chat template (default: text to go on with)"
    )
    parser.add_argument(
        "--lengths",
        nargs="+",
        type=at_least(256),
        default=[4096, 8192],
        metavar="N",
        help="tokens of prompt and answer (default: 4096 8192)",
    )
    parser.add_argument(
        "--policies",
        nargs="+",
        default=["full", "oracle", "pqcache", "clusterkv"],
        metavar="NAME",
        help="any of the worker's; all: every one that wraps no other; ablations: the papers', beside the methods that "
        "they are of (default: full oracle pqcache clusterkv)",
    )
    parser.add_argument(
        "--budgets",
        nargs="+",
        type=budget,
        default=[0.2, 0.1],
        metavar="SHARE|N",
        help="share of the prefilled tokens attended, or from 2 up their number; full has none (default: 0.2 0.1)",
    )
    parser.add_argument(
        "--protocols",
        nargs="+",
        choices=PROTOCOLS,
        default=list(PROTOCOLS),
        metavar="P",
        help="P1 prefills the question too, P2 decodes it (default: P1 P2)",
    )
    parser.add_argument(
        "--documents", type=at_least(1), default=100, metavar="N", help="per cell (default: 100)"
    )
    parser.add_argument(
        "--rounds-of",
        type=at_least(1),
        metavar="N",
        help="ask every cell N documents, then every cell the next N, so that a run cut off is a whole table of fewer "
        "(default: one cell after the other)",
    )
    parser.add_argument(
        "--limit-seconds",
        type=float,
        metavar="S",
        help="ask nothing more after so long, the start of the worker included; --json then has what there is",
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the questions (default: 1)")
    parser.add_argument(
        "--shard",
        type=_shard,
        default=(0, 1),
        metavar="I/N",
        help="only every N-th document, from the I-th (from 0)",
    )
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write everything measured here")
    parser.add_argument("--resume", action="store_true", help="go on with what --json FILE already holds")
    parser.add_argument(
        "--merge",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="run nothing: join the reports of shards, show them and write --json",
    )
    measure = parser.add_mutually_exclusive_group()
    measure.add_argument(
        "--measure-documents",
        type=at_least(1),
        metavar="N",
        help="measure attention mass and recall rate for the first N documents only, which saves time (default: all)",
    )
    measure.add_argument(
        "--no-measure",
        dest="measure",
        action="store_false",
        help="no attention mass and recall rate, which slow decoding; then its time is compared",
    )
    parser.add_argument("--timeout", type=float, default=900.0, metavar="S", help="per answer (default: 900)")
    parser.add_argument(
        "--concurrency",
        type=at_least(1),
        metavar="N",
        help="questions at once (default: what the worker runs at once)",
    )
    parser.add_argument(
        "--worker",
        metavar="ADDRESS",
        help="use a running worker (unix:PATH or HOST:PORT) instead of an own one",
    )
    own = parser.add_argument_group("the worker and store that are started without --worker")
    for each in (*options_of(ServeOptions), *options_of(StudyOptions)):
        if each.field in OWN:
            default = OWN[each.field]
            shown = f" (default: {default or each.shown})" if default or each.shown else ""
            own.add_argument(
                each.flags[0],
                dest=each.field,
                nargs="+" if each.is_list else None,
                default=default,
                metavar=each.metavar,
                help=each.help + shown,
            )
    own.add_argument(
        "--store-runtime",
        dest="runtime",
        choices=("process", "ray"),
        default="process",
        help="where the store runs (default: process)",
    )


def _task(text: str) -> str:
    if text in TASKS or text in GROUPS:
        return text
    raise argparse.ArgumentTypeError(
        f"{text!r} is not a task; use {', '.join((*TASKS, *GROUPS))}, or lm_eval for data sets in files"
    )


def _shard(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not (index.isdigit() and count.isdigit() and int(index) < int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is no shard I/N with I below N, such as 0/4")
    return int(index), int(count)
