"""How far an answer is in its grammar, and what may follow."""

from __future__ import annotations

import time
from collections.abc import Collection
from concurrent.futures import Executor, Future, wait
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_worker.errors import RequestError
from gpu_worker.grammar.compiling import reason_of
from gpu_worker.grammar.number_bounds import NumberBound

# Of masks, above which they are computed on a side thread: a decode step takes some ten times as long, at least.
SLOW_SECONDS = 1e-3
# Of the newest mask, in the mean of how long they take.
NEWEST_SHARE = 0.2
WORD_BITS = 32

# a bit for each token of the grammar's vocabulary, and whether the answer may end
_Mask = tuple[npt.NDArray[np.int32], bool]


class GrammarConstraint:
    """One answer's `gpu_worker.records.Constraint`.

    The mask of the next token is computed when it is asked for, which is while the device is at the step that makes its
    logits. Where that takes long, it is begun on a thread of its own as soon as the last token is known; until it is
    there `is_ready` is false, and others need not wait.
    """

    def __init__(
        self,
        matcher: Any,
        vocabulary: Any,
        param: str,
        executor: Executor,
        numbers: NumberBound | None = None,
    ) -> None:
        """matcher: llguidance's, of this answer only, at its beginning. vocabulary: its LLTokenizer. param: the
        request's field, for errors. executor: for masks that take long; the first is computed here. numbers: of a
        grammar of JSON."""
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._numbers = numbers
        self._eos_token_ids = vocabulary.eos_tokens
        self._num_words = -(-vocabulary.vocab_size // WORD_BITS)
        self._param = param
        self._executor = executor
        self._seconds = 0.0
        self._is_complete = False
        self._mask: Future[_Mask] | None = None
        self._compute_now()

    @property
    def is_ready(self) -> bool:
        return self._mask is None or self._mask.done()

    @property
    def is_complete(self) -> bool:
        return self._is_complete

    def take(self, token_id: int) -> None:
        if self._mask is not None:
            # until then the matcher may not be touched
            wait([self._mask])
        if not self._matcher.consume_token(token_id):
            raise self._error()
        if self._numbers is not None:
            self._numbers.take(self._vocabulary.decode_bytes([token_id]))
        # now: while a mask is computed nothing may be asked
        self._is_complete = bool(self._matcher.is_stopped())
        is_slow = self._seconds > SLOW_SECONDS
        self._mask = self._executor.submit(self._compute) if is_slow else None

    def allowed(self, vocab_size: int, end_token_ids: Collection[int]) -> npt.NDArray[np.int32]:
        words, may_end = (self._mask or self._compute_now()).result()
        # of a larger vocabulary than the grammar's none of the rest is allowed
        mask = np.zeros(-(-vocab_size // WORD_BITS), np.int32)
        known = mask[: len(words)]
        known[:] = words[: len(mask)]
        _put(mask, self._eos_token_ids, False)
        if self._numbers is not None:
            known[:] = self._numbers.narrow(known, may_end and bool(end_token_ids))
        _put(mask, end_token_ids, may_end)
        if not mask.any():
            # any token will do: whatever it is, `take` fails
            mask[:] = -1
        return mask

    def _compute_now(self) -> Future[_Mask]:
        self._mask = Future()
        self._mask.set_result(self._compute())
        return self._mask

    def _compute(self) -> _Mask:
        begun = time.perf_counter()
        words = np.zeros(self._num_words, np.int32)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        may_end = bool(self._matcher.is_accepting())
        self._seconds += NEWEST_SHARE * (time.perf_counter() - begun - self._seconds)
        return words, may_end

    def _error(self) -> RequestError:
        reason = reason_of(self._matcher.get_error())
        return RequestError(
            f"The answer cannot go on by {self._param}: {reason or 'no token may follow'}. Simplify the grammar.",
            self._param,
        )


def _put(mask: npt.NDArray[np.int32], token_ids: Collection[int], is_allowed: bool) -> None:
    words = mask.view(np.uint32)
    for word, at in (divmod(token_id, WORD_BITS) for token_id in token_ids):
        if word < len(words):
            bit = np.uint32(1 << at)
            words[word] = words[word] | bit if is_allowed else words[word] & ~bit
