"""Token ids to text: as a growing answer, and each token on its own."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache

from tokenizers import Tokenizer

from gateway.exchange import TokenLogprob
from gpu_worker.v1 import gpu_worker_pb2 as pb

Decode = Callable[[list[int]], str]

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# a character needs at most four tokens; past that the bytes are garbage and are shown as such
MAX_PENDING_TOKENS = 12
NUM_CONTEXT_TOKENS = 4


class Detokenizer:
    """Incremental decoding: the pieces that `push` and `flush` return add up to the text of all tokens.

    A token alone does not say its text: a character may be split over tokens, and some tokenizers drop a space at
    the start. So each new token is decoded behind a few earlier ones, and text that ends in an unfinished
    character waits. The window is bounded, so a token costs the same however long the text is.

    Not `tokenizers.decoders.DecodeStream` (0.23): it keeps every token since the last whole character, so that 8,000
    tokens of half ones take 16 s and show nothing, and it drops an unfinished or replaced character at the end.
    """

    def __init__(self, decode: Decode, prompt_token_ids: Sequence[int], anchor: Sequence[int] = ()) -> None:
        """anchor: tokens with a text, read in front of a prompt whose end has none, so that a space at the start of
        the text stays where the tokenizer would drop it."""
        self._decode = decode
        self._window = list(prompt_token_ids[-NUM_CONTEXT_TOKENS:])
        if anchor and not decode(self._window):
            self._window = [*anchor, *self._window]
        # tokens at the head of the window whose text is out, and characters of the window's text that are out
        self._num_context = len(self._window)
        self._num_emitted = len(decode(self._window)) if self._window else 0

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        settled = text.rstrip(REPLACEMENT)
        num_pending = len(self._window) - self._num_context
        if len(settled) == len(text) or num_pending >= MAX_PENDING_TOKENS:
            return self._settle(text)
        piece = settled[self._num_emitted :]
        self._num_emitted = max(self._num_emitted, len(settled))
        return piece

    def flush(self) -> str:
        """Return the text that was held back, unfinished characters included."""
        return self._settle(self._decode(self._window)) if self._window else ""

    def _settle(self, text: str) -> str:
        piece = text[self._num_emitted :]
        pending = self._window[self._num_context :]
        context = pending[-NUM_CONTEXT_TOKENS:]
        context_text = self._decode(context)
        # a window that begins inside a character, or shows nothing, is no context: keep the older one
        if context_text and not context_text.startswith(REPLACEMENT):
            self._window, self._num_emitted = context, len(context_text)
        else:
            self._window = self._window[-2 * MAX_PENDING_TOKENS :]
            self._num_emitted = len(self._decode(self._window))
        self._num_context = len(self._window)
        return piece


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
