"""How likely a prompt's own tokens are: of each the log probability after those before it, for requests that ask."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gpu_worker.device import Mark, to_device
from gpu_worker.models import Decoder
from gpu_worker.records import PromptEvent
from gpu_worker.sampling.filters import first_k, ranks
from gpu_worker.state.sequence import Sequence

# Of logits, float32, at once; on a GPU of so many tokens at least: for few the head's weights take as long to read.
LOGIT_BYTES = 8 << 20
GPU_TOKENS = 128
# Logits as the head gives them and as float32, and what puts them in order: whole numbers, at last of twice their size.
COPIES = 6


def scoring_bytes(num_tokens: int, vocab_size: int) -> int:
    """The most of a GPU's memory that is alive at once to score so many tokens."""
    return COPIES * 4 * vocab_size * min(num_tokens, _at_once(vocab_size, is_cuda=True))


def _at_once(vocab_size: int, is_cuda: bool) -> int:
    return max(GPU_TOKENS if is_cuda else 1, LOGIT_BYTES // (4 * vocab_size))


class PromptScores:
    """Takes the last layer's output as it is computed, and keeps a few numbers of each token until they are told.

    Until they are sent [1 + k] float32 and [1 + k] int64 a token are kept on the host, k of the request, in one piece:
    many small ones would lie between logits that are freed, and keep the host's memory from being used again.
    """

    def __init__(self, sequence: Sequence, decoder: Decoder, num_top: int) -> None:
        self._sequence = sequence
        self._decoder = decoder
        self._num_top = min(num_top, decoder.config.vocab_size)
        shape = (len(sequence.request.prompt_token_ids) - 1, 1 + self._num_top)
        is_cuda = decoder.device.type == "cuda"
        self._at_once = _at_once(decoder.config.vocab_size, is_cuda)
        self._logprobs = torch.empty(shape, dtype=torch.float32, pin_memory=is_cuda)
        self._numbers = torch.empty(shape, dtype=torch.int64, pin_memory=is_cuda)
        self._copied: Mark | None = None

    def take(self, hidden: Tensor, begin: int) -> None:
        """hidden: [T, hidden_size] of the prompt's tokens from position `begin` on; each says how likely the next is,
        and the prompt's last nothing."""
        token_ids = self._sequence.request.prompt_token_ids[begin + 1 : begin + 1 + len(hidden)]
        for first in range(0, len(token_ids), self._at_once):
            some = np.array(token_ids[first : first + self._at_once], dtype=np.int64)
            of_next = to_device(some, hidden.device)
            logits = self._decoder.logits(hidden[first : first + len(of_next)])
            top_ids = first_k(logits, self._num_top)
            wanted = torch.cat([of_next.unsqueeze(-1), top_ids], dim=-1)
            logprobs = torch.log_softmax(logits, dim=-1).gather(-1, wanted)
            numbers = torch.cat([ranks(logits, of_next).unsqueeze(-1), top_ids], dim=-1)
            places = slice(begin + first, begin + first + len(of_next))
            self._logprobs[places].copy_(logprobs, non_blocking=True)
            self._numbers[places].copy_(numbers, non_blocking=True)
        self._copied = Mark(hidden.device)

    def tell(self) -> None:
        """Wait for them, and send them as they are: the service makes messages of them, beside the engine's thread."""
        if self._copied is not None:
            self._copied.wait()
        # set before: who gives way from here on is not scored again
        self._sequence.is_scored = True
        token_ids = self._sequence.request.prompt_token_ids[1:]
        self._sequence.sink(PromptEvent(token_ids, self._logprobs.numpy(), self._numbers.numpy()))
