"""Masks of grammars: all logits are read with their bits, those that may not come are written."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.kernels.base import KernelCase, Operands, Setting, num_bytes_of, relative_error


def cases(setting: Setting) -> Iterator[KernelCase]:
    keep_allowed, reference = setting.both("kernels.keep_allowed", "keep_allowed")
    vocab_size, device = setting.shape.vocab_size, setting.device
    num_words = -(-vocab_size // 32)
    for count in sorted({workload.batch for workload in setting.workloads}):

        def make(count: int = count) -> Operands:
            logits = torch.randn(count, vocab_size, device=device)
            words = torch.randint(-(2**31), 2**31, (count, num_words), device=device).int()
            rows = torch.arange(count, dtype=torch.int32, device=device)
            # A byte for each token, as a host may unpack them.
            is_removed = torch.rand(count, vocab_size, device=device) < 0.5

            def error() -> float:
                found, wanted = logits.clone(), logits.clone()
                keep_allowed(found, rows, words)
                reference(wanted, rows, words)
                return relative_error(found, wanted)

            def rival() -> torch.Tensor:
                return logits.masked_fill_(is_removed, -torch.inf)

            return Operands(lambda: keep_allowed(logits, rows, words), rival, error)

        words, logits = torch.empty(count, num_words), torch.empty(count, vocab_size)
        # Half of them are written.
        num_bytes = num_bytes_of(words, logits) + num_bytes_of(logits) // 2
        yield KernelCase("keep_allowed", f"{count} x {vocab_size}", num_bytes, make, "masked_fill_ of bytes")
