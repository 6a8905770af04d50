"""Which heads have keys that are like no others: calibration of the heads that must not be merged."""

from __future__ import annotations

from torch import Tensor

from gpu_worker.policies.chelsea.soft_matching import match_rows


def outlier_scores(
    keys: Tensor, num_sink: int = 16, num_recent: int = 64, chunk: int = 256, threshold: float = 0.8
) -> Tensor:
    """How ill each head takes to merging: of the tokens that soft matching would merge, the share whose best cosine is
    below the threshold (Hu et al., Chelsea, appendix B). The mean over samples of text is the head's score.

    keys: [H_kv, n, d], rotated, of one layer of one sample. num_sink, num_recent, chunk: as in `Chelsea`. Returns
    float32 [H_kv]. Raises ValueError when sinks and window leave fewer than 2 tokens.
    """
    num_tokens = keys.shape[1]
    if num_tokens < num_sink + num_recent + 2:
        raise ValueError(
            f"the sample has {num_tokens} tokens, of which {num_sink} sinks and {num_recent} in the window "
            f"are not matched; take at least {num_sink + num_recent + 2}"
        )
    similarity = match_rows(keys[:, num_sink : num_tokens - num_recent], chunk).similarity
    return (similarity < threshold).float().mean(dim=1)


def most_outlying(scores: Tensor, share: float = 0.04) -> frozenset[tuple[int, int]]:
    """The share of heads, rounded, that score highest, as (layer, KV head); of equal ones the lower layer and head.

    scores: float32 [L, H_kv], means over samples.
    """
    num_heads = scores.shape[1]
    best = scores.flatten().argsort(descending=True, stable=True)[: round(share * scores.numel())]
    return frozenset(divmod(place, num_heads) for place in best.tolist())
