"""Token ids to text, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
