"""Prompts whose keys, values and queries are random: what a benchmark of decoding needs of a prompt, without computing
it."""

from __future__ import annotations

from gpu_worker.runner.prompts.layered import Prefill


class SyntheticPrefill(Prefill):
    """Random rows go where computed ones would: slots, arena, index, compression. All buffers are filled once."""

    def _run_quantum(self, wait: bool) -> None:
        for random in (*self._buffers, *(prompt.queries for prompt in self.prompts)):
            random.normal_()
        while not self._is_computed:
            self._finish_layer()
            self._settle()
        while not self.is_done:
            for prompt in self.prompts:
                prompt.wait()
            self._settle()
