"""Runs `python -m gpu_worker.calibration` on samples of texts, and shows its progress."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console

from carrel.process.options import OptionError
from carrel.serve.endpoints import runtime_dir
from carrel.serve.one_shot import run_to_end
from carrel.serve.process import ChildSpec
from carrel.serve.signals import sigterm_as_interrupt
from carrel.texts import read_text


def calibrate(
    model: str,
    samples: Sequence[Sequence[int]],
    flags: Mapping[str, object],
    environment: Mapping[str, str],
    notes: Console,
) -> list[str]:
    """Run the calibrating process and return its lines. Main thread only.

    flags: of `python -m gpu_worker.calibration`; those that are None are left out. SIGTERM ends it as Ctrl-C does.
    Raises ChildError with the process's own words.
    """
    with runtime_dir() as folder, sigterm_as_interrupt():
        path = folder / "samples.jsonl"
        path.write_text("".join(f"{json.dumps(list(sample))}\n" for sample in samples))
        return run_to_end(_spec(model, path, flags), environment, notes)


def _spec(model: str, samples: Path, flags: Mapping[str, object]) -> ChildSpec:
    given = [text for name, value in flags.items() if value is not None for text in (name, str(value))]
    # -P: a folder of the same name where the user stands is not taken for ours
    command = (sys.executable, "-P", "-m", "gpu_worker.calibration", model, "--samples", str(samples))
    return ChildSpec("calibration", (*command, *given, "--json-events"), lambda: True, 0, 0)


if TYPE_CHECKING:
    from gateway.tokenizer import Tokenizer

# sinks and window are not measured, and a sample should be longer than both by far
LEAST_TOKENS = 256


def cut_samples(paths: Sequence[Path], tokenizer: Tokenizer, num_tokens: int, length: int) -> list[list[int]]:
    """Samples of `length` tokens, `num_tokens` in all, or fewer where the texts have fewer.

    Each begins with what the model expects before any text. A text is cut into whole samples and its rest left out; one
    that is too short for that is a shorter sample. Raises OptionError as `read_text` does, and for a text of fewer than
    `LEAST_TOKENS`.
    """
    length = min(length, num_tokens)
    prefix = list(tokenizer.encode("", add_special_tokens=True))
    size = length - len(prefix)
    pieces: list[np.ndarray] = []
    for path in paths:
        ids = np.array(tokenizer.encode(read_text(path), add_special_tokens=False), dtype=np.int32)
        if len(ids) + len(prefix) < LEAST_TOKENS:
            raise OptionError(f"--text {path} has {len(ids)} tokens; give at least {LEAST_TOKENS}")
        num_whole = len(ids) // size
        pieces += np.split(ids[: num_whole * size], num_whole) if num_whole else [ids]
    count = min(len(pieces), num_tokens // length)
    # the middle of each of `count` equal parts of all pieces
    chosen = [pieces[(2 * place + 1) * len(pieces) // (2 * count)] for place in range(count)]
    return [prefix + piece.tolist() for piece in chosen]
