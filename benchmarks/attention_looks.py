"""What it costs to tell requests which tokens they attend: `python -m benchmarks.attention_looks MODEL`.

The same sequences decode by turns without the part of the engine that looks, with it while nobody asks, and while all
of them ask. Printed are the steps of each kind, how often was looked, and the host's time for looks as a share of the
steps of those that ask.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace

from benchmarks.in_turn import add_arguments, as_json, decoding, engine_for, in_turn, num_steps, show, write
from gpu_worker.engine.steps.attention_views import AttentionViews
from gpu_worker.records import AttentionEvent, Event
from gpu_worker.state.batch import Batch

KINDS = ("without", "not asked", "asked")


class NoViews(AttentionViews):
    """An engine without them."""

    def __init__(self) -> None:
        """Nothing to keep."""

    def after_step(self, batch: Batch) -> None:
        """Nothing to tell."""


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    options, load = parser.parse_args(), os.getloadavg()[0]
    looks: list[Event] = []

    def sink(event: Event) -> None:
        match event:
            case AttentionEvent():
                looks.append(event)

    num_tokens = num_steps(options, len(KINDS)) + 64
    with engine_for(options, num_tokens) as engine:
        sequences, decode = decoding(engine, options, num_tokens, sink), engine.decode
        views, none = decode.views, NoViews()

        def prepare(kind: str) -> None:
            decode.views = none if kind == "without" else views
            for sequence in sequences:
                sequence.request = replace(sequence.request, attention=kind == "asked")

        kinds = {kind: lambda kind=kind: prepare(kind) for kind in KINDS}
        found = in_turn(engine, kinds, options.blocks, options.steps)
        num_asked = (options.blocks + 1) * options.steps
        share = views.spent_seconds / (found["asked"].ms.median / 1e3 * num_asked)
        show(found)
        print(f"{len(looks)} looks in {num_asked} steps take {100 * share:.2f} % of the host's time")
        if options.json is not None:
            counts = {"num_looks": len(looks), "num_asked_steps": num_asked, "share_of_host": share}
            write("benchmarks.attention_looks", options, load, engine, {"steps": as_json(found), **counts})


if __name__ == "__main__":
    main()
