"""Memory for prompts in progress, in tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# Below this a prompt's rows are few.
LEAST_BUFFER_TOKENS = 64


def buffer_tokens(num_tokens: int, max_model_len: int) -> int:
    """Rows of a head in a prompt's buffers: few different numbers, since cuDNN plans attention for each."""
    return min(max_model_len, max(LEAST_BUFFER_TOKENS, 1 << (num_tokens - 1).bit_length()))


def buffer_sizes(max_model_len: int) -> list[int]:
    """All that `buffer_tokens` gives."""
    sizes = [LEAST_BUFFER_TOKENS]
    while sizes[-1] < max_model_len:
        sizes.append(2 * sizes[-1])
    return sorted({buffer_tokens(size, max_model_len) for size in sizes})


@dataclass(frozen=True, slots=True)
class PromptRoom:
    """Tokens of the buffers of all prompts in progress.

    Prompts of at most a chunk have an eighth of the longest one's memory for themselves: they overtake the others, and
    neither kind keeps the other from its memory.
    """

    max_model_len: int
    prefill_chunk: int

    @property
    def total(self) -> int:
        return self._of_short + self.max_model_len

    @property
    def _of_short(self) -> int:
        return max(self._width(self.prefill_chunk), self.max_model_len // 8)

    def _width(self, num_tokens: int) -> int:
        return buffer_tokens(num_tokens, self.max_model_len)

    def is_short(self, num_tokens: int) -> bool:
        return num_tokens <= self.prefill_chunk

    def fits(self, num_tokens: int, others: Iterable[int], computed: Iterable[int] = ()) -> bool:
        """Return whether a prompt's buffers fit next to those of prompts in progress.

        num_tokens: of the prompt.
        others: tokens of each other prompt that is still being computed.
        computed: tokens of each prompt of which nothing is left to compute.

        While no longer prompt needs the longest one's memory, computed prompts take of it and not of the short ones'
        own.
        """
        width, left, computed = self._width(num_tokens), list(others), list(computed)
        short, longer = (
            sum(self._width(each) for each in (*left, *computed) if self.is_short(each) is kind)
            for kind in (True, False)
        )
        if not self.is_short(num_tokens):
            return width + longer + max(0, short - self._of_short) <= self.max_model_len
        if width + short <= self._of_short:
            return True
        of_left = sum(map(self._width, left))
        return not longer and width + of_left <= self._of_short and width + short <= self.total
