"""Prompts whose keys, values and queries are random: what a benchmark of decoding needs of a prompt, without computing
it."""

from __future__ import annotations

from gpu_worker.engine.prefill import Prefill


class SyntheticPrefill(Prefill):
    """Random rows go where computed ones would: slots, arena, index, compression. All buffers are filled once."""

    def advance(self) -> None:
        for buffer in (*self._buffers, self._queries):
            buffer.normal_()
        while not self._is_computed:
            self._finish_layer()
            self._take_copied()
        while self._computed:
            self._computed[0].pending.copied.wait()
            self._take_copied()
        self.sequence.num_tokens = self._num_tokens
