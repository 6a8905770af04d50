"""The bytes of a model's tokens, for its grammars: of a directory's tokenizer.json, or of a GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from carrel.process.gguf_file import GGUFError, read_gguf

# of tokens in a GGUF file, by ggml's numbers
_USER_DEFINED, _BYTE = 4, 6
_SPECIAL = frozenset({2, 3, 5})
_SPACE = "\u2581"


class VocabularyError(ValueError):
    """A model whose tokens' bytes cannot be found; the text says why, and what to do."""


class _Tokens:
    """The tokens of a tokenizer, as llguidance reads them."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special_token_ids: list[int], eos_token_id: int) -> None:
        self.tokens = tokens
        self.special_token_ids = special_token_ids
        self.eos_token_id = eos_token_id
        special = set(special_token_ids)
        # of tokens with the same bytes the first
        self._ids = {text: at for at, text in reversed(list(enumerate(tokens))) if text and at not in special}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: str | bytes) -> list[int]:
        """Token ids of a text that the grammar forces, of which it allows the first: always the longest, as the
        model's own merges nearly always give."""
        rest, found = text.encode() if isinstance(text, str) else text, list[int]()
        while rest:
            begun = (rest[:length] for length in range(min(self._longest, len(rest)), 0, -1))
            if (token := next((each for each in begun if each in self._ids), None)) is None:
                break
            found.append(self._ids[token])
            rest = rest[len(token) :]
        return found


def read_vocabulary(library: Any, source: Path, eos_token_ids: Sequence[int]) -> Any:
    """llguidance's LLTokenizer, of a model's directory or GGUF file. Takes some tenths of a second. Raises
    VocabularyError."""
    eos = list(eos_token_ids) or None
    try:
        if source.is_file():
            return library.LLTokenizer(
                library.TokenizerWrapper(_read_gguf(source, eos_token_ids)), eos_token=eos
            )
        path = source / "tokenizer.json"
        if not path.is_file():
            raise VocabularyError(
                f"{source} has no tokenizer.json: put the one that the gateway uses there, and restart the worker"
            )
        return library.LLTokenizer(path.read_text(encoding="utf-8"), eos_token=eos)
    except (GGUFError, VocabularyError) as error:
        raise VocabularyError(str(error)) from error
    except (OSError, ValueError) as error:
        raise VocabularyError(f"the tokens of {source} cannot be read: {error}") from error


def _read_gguf(path: Path, eos_token_ids: Collection[int]) -> _Tokens:
    metadata = read_gguf(path).metadata
    kind, texts = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.tokens")
    if kind not in _KINDS or not isinstance(texts, list):
        raise VocabularyError(f"{path} has a vocabulary of model {kind!r}; supported: {', '.join(_KINDS)}")
    sorts = metadata.get("tokenizer.ggml.token_type")
    sorts = sorts if isinstance(sorts, list) else [1] * len(texts)
    to_bytes = _KINDS[str(kind)]
    tokens = [
        text.encode() if sort in (*_SPECIAL, _USER_DEFINED) else to_bytes(text, sort)
        for text, sort in zip(texts, sorts, strict=True)
    ]
    special = [token_id for token_id, sort in enumerate(sorts) if sort in _SPECIAL]
    return _Tokens(tokens, special, min(eos_token_ids, default=0))


def _byte_characters() -> dict[str, int]:
    """A byte of each character that stands for one: itself where it can be seen, else one from 256 on, in order."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unseen = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + at): byte for at, byte in enumerate(unseen)}


_BYTES = _byte_characters()


def _byte_level(text: str, sort: int) -> bytes:
    return bytes(_BYTES[character] for character in text) if set(text) <= _BYTES.keys() else text.encode()


def _sentence_piece(text: str, sort: int) -> bytes:
    # <0x0A>
    return bytes([int(text[3:5], 16)]) if sort == _BYTE else text.replace(_SPACE, " ").encode()


# tokenizer.ggml.model -> a token's bytes, of its text and sort
_KINDS: dict[str, Callable[[str, int], bytes]] = {"gpt2": _byte_level, "llama": _sentence_piece}
