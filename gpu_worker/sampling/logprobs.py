"""Log-probabilities under the model's own distribution."""

from __future__ import annotations

import torch

from gpu_worker.sampling.filters import first_k


def gather_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> tuple[list[float], list[list[tuple[int, float]]]]:
    """Log-probability of each row's token, and of its `num_top` likeliest tokens, best first.

    Args:
        logits: [B, V] float32, raw: before penalties, bias and temperature.
        token_ids: [B] int64.
        num_top: from 0 up; no more than V are reported. Ties fall to the smaller token id.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    top_ids = first_k(logits, min(num_top, logits.shape[-1]))
    wanted = torch.cat([token_ids.unsqueeze(-1), top_ids], dim=-1)
    rows = logprobs.gather(-1, wanted).tolist()
    tops = [list(zip(ids, row[1:], strict=True)) for ids, row in zip(top_ids.tolist(), rows, strict=True)]
    return [row[0] for row in rows], tops
