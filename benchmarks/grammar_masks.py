"""What one answer's grammar costs the others of its batch: `python -m benchmarks.grammar_masks MODEL`.

The same sequences decode by turns with none of them held to a grammar, and with the first held to a JSON schema. Beside
the steps of both kinds it prints what a mask takes of a processor, in microseconds: computing it, taking the token, and
having the sampler keep to it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Collection
from dataclasses import asdict

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.figures import Spread
from benchmarks.in_turn import add_arguments, as_json, decoding, engine_for, in_turn, num_steps, show, write
from gpu_worker.grammar import Grammars
from gpu_worker.records import Constraint, Grammar, GrammarKind, SamplingParams
from gpu_worker.sampling import Sampler, SamplerState

KINDS = ("free", "held")
# An answer that does not end: people with names, ages and addresses of mail.
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "mail": {"type": "string", "format": "email", "maxLength": 60},
        "kind": {"enum": ["reader", "writer", "editor"]},
    },
    "required": ["name", "age", "mail", "kind"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": PERSON, "minItems": 1000}
# Of the sampler alone, with and without a mask.
REPEATS = 200


class Timed:
    """A constraint, and the seconds of a processor that it took each time."""

    def __init__(self, inner: Constraint) -> None:
        self._inner = inner
        self.masks: list[float] = []
        self.tokens: list[float] = []
        self.latest: npt.NDArray[np.int32] | None = None

    @property
    def is_ready(self) -> bool:
        return self._inner.is_ready

    @property
    def is_complete(self) -> bool:
        return self._inner.is_complete

    def take(self, token_id: int) -> None:
        begun = time.process_time()
        self._inner.take(token_id)
        self.tokens.append(time.process_time() - begun)

    def allowed(self, vocab_size: int, end_token_ids: Collection[int]) -> npt.NDArray[np.int32]:
        begun = time.process_time()
        self.latest = self._inner.allowed(vocab_size, end_token_ids)
        self.masks.append(time.process_time() - begun)
        return self.latest


class Fixed:
    """Always the same mask."""

    is_ready, is_complete = True, False

    def __init__(self, mask: npt.NDArray[np.int32]) -> None:
        self._mask = mask

    def take(self, token_id: int) -> None:
        """All may follow."""

    def allowed(self, vocab_size: int, end_token_ids: Collection[int]) -> npt.NDArray[np.int32]:
        return self._mask


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    options, load = parser.parse_args(), os.getloadavg()[0]
    num_tokens = num_steps(options, len(KINDS)) + 64
    with engine_for(options, num_tokens) as engine:
        grammars = Grammars(options.model, engine.info.eos_token_ids)
        schema = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA), "response_format")
        held = Timed(grammars.compile(schema).result())
        sampler = decoding(engine, options, num_tokens, constraint=held)[0].sampler

        def prepare(constraint: Constraint | None) -> Callable[[], None]:
            return lambda: setattr(sampler, "constraint", constraint)

        kinds = dict(zip(KINDS, map(prepare, (None, held)), strict=True))
        found = in_turn(engine, kinds, options.blocks, options.steps)
        grammars.close()
        assert held.latest is not None
        keeping = keeping_us(held.latest, options.batch, engine.info.vocab_size, engine.info.device)
        micros = {
            "mask_us": asdict(Spread.of(held.masks).scaled(1e6)),
            "token_us": asdict(Spread.of(held.tokens).scaled(1e6)),
            "keeping_us": keeping,
        }
        show(found)
        print(f"{len(held.masks)} masks of {engine.info.vocab_size} tokens: {micros}")
        if options.json is not None:
            content = {"steps": as_json(found), "num_masks": len(held.masks), **micros}
            write("benchmarks.grammar_masks", options, load, engine, content)


def keeping_us(mask: npt.NDArray[np.int32], batch: int, vocab_size: int, device: str) -> float:
    """What the sampler takes longer for a batch of logits where the first row has this mask: medians' difference, in
    microseconds."""
    logits = torch.randn(batch, vocab_size, device=device)
    medians = []
    for constraint in (None, Fixed(mask)):
        states = [
            SamplerState(SamplingParams(temperature=0.0), (), vocab_size, (), str(row), constraint=each)
            for row, each in enumerate([constraint, *[None] * (batch - 1)])
        ]
        taken = []
        for _ in range(REPEATS):
            begun = time.process_time()
            Sampler().sample(logits, states)
            taken.append(time.process_time() - begun)
        medians.append(statistics.median(taken))
    return 1e6 * (medians[1] - medians[0])


if __name__ == "__main__":
    main()
