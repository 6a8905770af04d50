"""carrel-nano's tokenizer, and grammars of its vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from gpu_worker.grammar import Grammars

MODEL = Path(__file__).parents[3] / "models" / "carrel-nano"
END = 4


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    grammars = Grammars(str(MODEL), (END,))
    yield grammars
    grammars.close()
