"""Prefills sample texts and collects what policies need of each KV head's queries and keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.errors import ModelError
from gpu_worker.kernels.prefill_attention import attend_chunk
from gpu_worker.models import Decoder
from gpu_worker.policies.chelsea.policy import Chelsea
from gpu_worker.policies.chelsea.soft_matching import match_rows
from gpu_worker.policies.infinigen.policy import gram, skew_of
from gpu_worker.row_format import empty_rows

PREFILL_CHUNK = 2048
# (layers done, layers in all), over all samples
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Observation:
    """outlier_scores: float32 [L, H_kv], means over samples. skew: float32 [L, H_kv, d, d], of all samples together."""

    outlier_scores: Tensor
    skew: Tensor


@torch.inference_mode()
def observe(
    decoder: Decoder,
    samples: Sequence[Sequence[int]],
    threshold: float,
    progress: Progress,
    chunk: int = PREFILL_CHUNK,
) -> Observation:
    """Prefill each sample on its own: heads that merging harms (Chelsea, appendix B) and the skew of all queries and
    keys (InfiniGen, section 4.2), on the CPU.

    samples: token ids. threshold: cosine below which a token has no near duplicate. chunk: tokens computed at once.
    Raises ValueError for a sample that leaves Chelsea nothing to match, ModelError where the model overflows.
    """
    config, device, chelsea = decoder.config, decoder.device, Chelsea()
    num_layers, heads = config.num_layers, config.num_kv_heads
    scores = torch.zeros(num_layers, heads, device=device)
    grams = torch.zeros(
        2, num_layers, heads, config.head_dim, config.head_dim, dtype=torch.float64, device=device
    )
    done, total = 0, len(samples) * num_layers
    progress(done, total)
    for sample in samples:
        hidden = decoder.embed(torch.tensor(sample, device=device))
        for layer in range(num_layers):
            queries, keys, hidden = observe_layer(decoder, layer, hidden, chunk)
            scores[layer] += outlier_scores(
                keys, chelsea.num_sink, chelsea.num_recent, chelsea.chunk, threshold
            )
            grams[0, layer] += gram(queries.reshape(heads, -1, config.head_dim))
            grams[1, layer] += gram(keys)
            done += 1
            progress(done, total)
    if not grams.isfinite().all():
        raise ModelError(f"the model gives NaN or infinity in {decoder.dtype}; try --dtype float32")
    skews = [skew_of(of_queries, of_keys) for of_queries, of_keys in zip(*grams, strict=True)]
    return Observation((scores / len(samples)).cpu(), torch.stack(skews).cpu())


def observe_layer(
    decoder: Decoder, layer: int, hidden: Tensor, chunk: int = PREFILL_CHUNK
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [H_q, n, d] and keys [H_kv, n, d], rotated, of one layer, and the next one's input [n, hidden]; of the
    last layer its own input, since its output is not read."""
    config, num_tokens = decoder.config, hidden.shape[0]
    positions = torch.arange(num_tokens, device=hidden.device)
    queries = hidden.new_empty(num_tokens, config.num_heads, config.head_dim)
    rows = empty_rows(decoder.row_format, config.num_kv_heads, num_tokens, device=hidden.device)
    output = hidden if layer == config.num_layers - 1 else torch.empty_like(hidden)
    for begin in range(0, num_tokens, chunk):
        span = slice(begin, begin + chunk)
        query, key, value = decoder.project_qkv(layer, hidden[span], positions[span])
        queries[span] = query
        rows[:, span, : config.head_dim] = key.transpose(0, 1)
        rows[:, span, config.head_dim :] = value.transpose(0, 1)
        if output is not hidden:
            attention = attend_chunk(query, rows, begin, decoder.attention_scale)
            output[span] = decoder.finish_layer(layer, hidden[span], attention)
    return queries.transpose(0, 1), rows[..., : config.head_dim], output


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
