"""The text and the bytes of a single token."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from tokenizers import Tokenizer

from gateway.detokenizer import REPLACEMENT
from gateway.exchange import TokenLogprob
from gpu_worker.v1 import gpu_worker_pb2 as pb

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# in vocabularies of bytes: these stand for themselves, the others, in order, for the characters from 256 on
_PLAIN = (*range(33, 127), *range(161, 173), *range(174, 256))
_OTHERS = [byte for byte in range(256) if byte not in _PLAIN]
_BYTES = {chr(byte): byte for byte in _PLAIN} | {chr(256 + at): byte for at, byte in enumerate(_OTHERS)}
# tokens whose texts are known without asking the vocabulary, some 200 bytes each
MAX_REMEMBERED = 1 << 16
# some decoders strip a space at the start of a text: a token is read behind this one
_ANCHOR = "a"


def read_logprobs(texts: TokenTexts, tokens: Iterable[pb.Token]) -> tuple[TokenLogprob, ...]:
    """The worker's tokens, with their texts."""

    def read(told: pb.Token | pb.TokenLogprob) -> TokenLogprob:
        return TokenLogprob(told.token_id, *texts.told(told.token_id), told.logprob)

    return tuple(
        replace(read(token), top=tuple(map(read, token.top)), rank=token.rank or None) for token in tokens
    )


class TokenTexts:
    """Texts and bytes of one vocabulary's tokens; any thread may ask. `anchor`: a token of plain text, behind which
    others are read as within a text."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        # alternatives are the same few again and again
        self.told = lru_cache(MAX_REMEMBERED)(self._told)
        self.anchor = backend.encode(_ANCHOR, add_special_tokens=False).ids[-1:]
        self._lead = self._decode(self.anchor)

    def _told(self, token_id: int) -> tuple[str, bytes]:
        return self.text(token_id), self.bytes(token_id)

    def text(self, token_id: int) -> str:
        """As it is within a text, a space at its start included; special tokens by their names."""
        behind = self._decode([*self.anchor, token_id])
        return behind[len(self._lead) :] if behind.startswith(self._lead) else self._decode([token_id])

    def bytes(self, token_id: int) -> bytes:
        """Its bytes in UTF-8, those of a part of a character too."""
        text = self.text(token_id)
        if REPLACEMENT not in text:
            return text.encode()
        entry = self._backend.id_to_token(token_id) or ""
        if found := _BYTE.fullmatch(entry):
            return bytes.fromhex(found[1])
        if all(each in _BYTES for each in entry):
            return bytes(_BYTES[each] for each in entry)
        return text.encode()

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._backend.decode(token_ids, skip_special_tokens=False))
