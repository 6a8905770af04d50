"""Documents of an exact length in tokens, cut out of books."""

from __future__ import annotations

import hashlib
import lzma
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.errors import BenchmarkError

SPECIAL_TEXT = ""


@dataclass(frozen=True)
class TextSource:
    """Where documents come from. sha256: of the text as UTF-8."""

    name: str
    sha256: str
    num_tokens: int


@dataclass(frozen=True)
class Text:
    """A tokenised book. `prefix` are the tokens that the model expects before any text."""

    source: TextSource
    prefix: tuple[int, ...]
    token_ids: tuple[int, ...]


def load_tokenizer(model: Path) -> Tokenizer:
    """Of a model's directory or GGUF file. Raises BenchmarkError."""
    path = model if model.is_file() else model / "tokenizer.json"
    try:
        if model.is_file():
            # imports transformers, which a directory needs not
            from gateway.gguf_tokenizer import read_gguf_tokenizer

            return read_gguf_tokenizer(model).backend_tokenizer
        return Tokenizer.from_file(str(path))
    # the library raises nothing narrower
    except Exception as exc:
        raise BenchmarkError(f"no tokenizer in {path}: {exc}") from exc


def read_text(path: Path, tokenizer: Tokenizer) -> Text:
    """A UTF-8 file, packed where its name ends in .xz. Raises BenchmarkError."""
    try:
        packed = path.read_bytes()
        data = lzma.decompress(packed) if path.suffix == ".xz" else packed
        text = data.decode()
    except (OSError, ValueError, lzma.LZMAError) as exc:
        raise BenchmarkError(f"{path} is no text: {exc}") from exc
    token_ids = tuple(tokenizer.encode(text, add_special_tokens=False).ids)
    source = TextSource(
        path.name.removesuffix(".xz").removesuffix(".txt"), hashlib.sha256(data).hexdigest(), len(token_ids)
    )
    return Text(source, tuple(tokenizer.encode(SPECIAL_TEXT).ids), token_ids)


def cut_documents(texts: Sequence[Text], count: int, length: int) -> list[tuple[int, ...]]:
    """`count` documents of `length` tokens, from the texts in turn and evenly spread over each.

    Those of one text overlap where it is too short for them to lie side by side. Raises BenchmarkError for a text that
    is shorter than one document.
    """
    found = []
    for index in range(count):
        turn, which = divmod(index, len(texts))
        text = texts[which]
        num_of_text = len(range(which, count, len(texts)))
        size = length - len(text.prefix)
        room = len(text.token_ids) - size
        if room < 0:
            raise BenchmarkError(
                f"{text.source.name} has {len(text.token_ids)} tokens, a document needs {size}: "
                "name a longer --text, or smaller --contexts"
            )
        begin = room * (2 * turn + 1) // (2 * num_of_text)
        found.append((*text.prefix, *text.token_ids[begin : begin + size]))
    return found
