"""Product quantisation of keys (PQCache, section 3.1): one codebook for each part of each head, by L2 or product."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gpu_worker.kernels.kmeans import lloyd
from gpu_worker.policies.pqcache.pq_score import augment, max_square_norms, pq_assign
from kv_store.client import PQParams

# More points a centroid change the codebook little, and a prompt waits for it: FAISS asks for 39 at least.
POINTS_PER_CENTROID = 64


def pq_bytes(keys: Tensor, params: PQParams) -> int:
    """See `RecallPolicy.training_bytes`. By L2 keys are read where they lie; by inner product they become float32 with
    a coordinate more in each part, from a float32 copy and its squares."""
    num_heads, num_tokens, head_dim = keys.shape
    num_parts, ksub = params.num_subvectors, 1 << params.num_bits
    copied = 0
    if params.metric == "ip":
        copied = 2 * 4 * num_heads * num_tokens * (head_dim + 2 * num_parts)
        keys = keys.new_empty(num_heads, num_tokens, head_dim + num_parts, dtype=torch.float32)
    sample = keys[:, : POINTS_PER_CENTROID * ksub]
    parts = sample.unflatten(-1, (num_parts, -1)).transpose(1, 2).flatten(0, 1)
    codes = num_heads * num_tokens * num_parts
    return copied + 2 * sample.nbytes + lloyd.fit_bytes(parts, ksub) + codes


def train_pq(keys: Tensor, params: PQParams, seed: int) -> Mapping[str, Tensor]:
    """See `RecallPolicy.train`: codebooks float32 [H, m, 2^b, d/m] and codes uint8 [H, T, m], by inner product a
    coordinate more in every centroid and max_square_norms float32 [H, m]. With no more tokens than centroids each token
    is its own."""
    iterations = params.max_iterations or lloyd.DEFAULT_ITERATIONS
    num_parts, ksub = params.num_subvectors, 1 << params.num_bits
    extra = {}
    if params.metric == "ip":
        extra["max_square_norms"] = max_square_norms(keys, num_parts)
        keys = augment(keys, extra["max_square_norms"][:, None])
    num_heads, num_tokens, head_dim = keys.shape
    num_points = min(num_tokens, POINTS_PER_CENTROID * ksub)
    places = lloyd.spread(num_tokens, num_points, seed, keys.device)
    sample = keys[:, places] if num_points < num_tokens else keys
    parts = sample.unflatten(-1, (num_parts, head_dim // num_parts)).transpose(1, 2).flatten(0, 1)
    if num_tokens <= ksub:
        filled = torch.arange(ksub, device=keys.device).clamp(max=num_tokens - 1)
        codebooks = parts[:, filled].float()
    else:
        fitted, _ = lloyd.fit(parts, ksub, iterations, seed, metric="l2")
        codebooks = fitted.means
    codebooks = codebooks.view(num_heads, num_parts, ksub, -1)
    return {"codebooks": codebooks, "codes": pq_assign(keys, codebooks), **extra}
