"""A checkpoint's folder without weights: the worker fills it at random (`--load-format dummy`)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from benchmarks.shapes import ModelShape
from carrel.serve.model import BUNDLED

# a blank in the byte-level alphabet of BPE
BLANK = "\u0120"


def write_random_model(folder: Path, shape: ModelShape) -> None:
    """Makes `folder`. Its tokenizer is the bundled model's, with as many words more as the shape has ids more: random
    weights answer with any id, and a server sends no piece for one without text. Text is encoded as before."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shape.config_fields()))
    for file in BUNDLED.glob("*token*.json"):
        shutil.copy(file, folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab |= {f"{BLANK}w{number}": number for number in range(len(vocab), shape.vocab_size)}
    path.write_text(json.dumps(tokenizer))
