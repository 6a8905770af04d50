"""Cuts texts into samples of token ids, evenly spread over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from carrel.process.options import OptionError
from carrel.texts import read_text

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
