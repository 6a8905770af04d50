"""The options of `carrel eval`."""

from __future__ import annotations

import argparse
from pathlib import Path

from carrel.evaluation.cells import PROTOCOLS
from carrel.evaluation.fact_suite import FACT_TASKS
from carrel.evaluation.tasks import GROUPS, TEXT_TASKS
from carrel.process.command_line import at_least, budget, flag, new_file
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
    flag(parser, "--model", "as for carrel serve (default: carrel-nano)", metavar="MODEL")
    flag(
        parser,
        "--books",
        "folder that holds heldout/*.txt.xz; mixed and needle need it, or --text-dir",
        parse=Path,
        metavar="DIR",
    )
    flag(
        parser,
        "--text-dir",
        "folder of *.txt or *.txt.xz for haystacks (default: those of --books; without, sentences are invented)",
        parse=Path,
        metavar="DIR",
    )
    flag(
        parser,
        "--tasks",
        f"{', '.join(TASKS)}; or {' and '.join(GROUPS)}, which stand for several; the first two are "
        "carrel-nano's",
        ["mixed"],
        _task,
        metavar="TASK",
    )
    parser.add_argument(
        "--fidelity",
        action="store_true",
        help="no tasks: perplexity of texts through decode steps, and the distance to full",
    )
    flag(
        parser,
        "--forced",
        "of --fidelity: last tokens of a text, which are forced through decode steps",
        128,
        at_least(2),
    )
    flag(
        parser, "--generate", "of --fidelity: tokens generated until one differs from full's", 32, at_least(0)
    )
    parser.add_argument(
        "--chat", action="store_true", help="ask in the model's chat template (default: text to go on with)"
    )
    flag(parser, "--lengths", "tokens of prompt and answer", [4096, 8192], at_least(256))
    flag(
        parser,
        "--policies",
        "any of the worker's; all: every one that wraps no other; ablations: the papers', beside the methods that "
        "they are of",
        ["full", "oracle", "pqcache", "clusterkv"],
        metavar="NAME",
    )
    flag(
        parser,
        "--budgets",
        "share of the prefilled tokens attended, or from 2 up their number; full has none",
        [0.2, 0.1],
        budget,
        metavar="SHARE|N",
    )
    flag(
        parser,
        "--protocols",
        "P1 prefills the question too, P2 decodes it",
        list(PROTOCOLS),
        metavar="P",
        choices=PROTOCOLS,
    )
    flag(parser, "--documents", "per cell", 100, at_least(1))
    flag(
        parser,
        "--rounds-of",
        "ask every cell N documents, then every cell the next N, so that a run cut off is a whole table of fewer "
        "(default: one cell after the other)",
        parse=at_least(1),
    )
    flag(
        parser,
        "--limit-seconds",
        "ask nothing more after so long, the start of the worker included; --json then has what there is",
        parse=float,
        metavar="S",
    )
    flag(parser, "--seed", "of the questions", 1, int)
    parser.add_argument(
        "--shard",
        type=_shard,
        default=(0, 1),
        metavar="I/N",
        help="only every N-th document, from the I-th (from 0)",
    )
    flag(parser, "--json", "write everything measured here", parse=new_file, metavar="FILE")
    parser.add_argument("--resume", action="store_true", help="go on with what --json FILE already holds")
    flag(
        parser,
        "--merge",
        "run nothing: join the reports of shards, show them and write --json",
        parse=Path,
        metavar="FILE",
        nargs="+",
    )
    measure = parser.add_mutually_exclusive_group()
    flag(
        measure,
        "--measure-documents",
        "measure attention mass and recall rate for the first N documents only, which saves time (default: all)",
        parse=at_least(1),
    )
    measure.add_argument(
        "--no-measure",
        dest="measure",
        action="store_false",
        help="no attention mass and recall rate, which slow decoding; then its time is compared",
    )
    flag(parser, "--timeout", "per answer", 900.0, float, metavar="S")
    flag(
        parser,
        "--concurrency",
        "questions at once (default: what the worker runs at once)",
        parse=at_least(1),
    )
    flag(
        parser,
        "--worker",
        "use a running worker (unix:PATH or HOST:PORT) instead of an own one",
        metavar="ADDRESS",
    )
    own = parser.add_argument_group("the worker and store that are started without --worker")
    for each in (*options_of(ServeOptions), *options_of(StudyOptions)):
        if each.field in OWN:
            default = OWN[each.field]
            shown = "" if default or not each.shown else f" (default: {each.shown})"
            flag(
                own,
                each.flags[0],
                each.help + shown,
                default,
                metavar=each.metavar,
                dest=each.field,
                nargs="+" if each.is_list else None,
            )
    flag(
        own,
        "--store-runtime",
        "where the store runs",
        "process",
        metavar=None,
        dest="runtime",
        choices=("process", "ray"),
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
