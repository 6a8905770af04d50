"""InfiniGen: the previous layer's input foretells the query, a few skewed columns the scores."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gpu_worker.errors import ConfigError
from gpu_worker.policies.base import CacheShape, Plan
from gpu_worker.policies.hyper_parameters import Share
from gpu_worker.policies.recall import Candidates, Leaving, PrefilledLayer, RecallPolicy

# Rows in float32, and partial keys of a step, are made so many elements at a time: 256 MiB.
MAX_ELEMENTS = 1 << 26


@dataclass(frozen=True, slots=True)
class InfiniGenIndex:
    """keys: [seats, L, H_kv, N, r] in their dtype, by position, the chosen columns of the skewed keys. columns: float32
    [seats, L, H_kv, d, r], the columns of A that were chosen. skew: float32 [L, H_kv, d, d], A from a file."""

    keys: Tensor
    columns: Tensor
    skew: Tensor | None


@dataclass(frozen=True, slots=True)
class InfiniGen(RecallPolicy[InfiniGenIndex]):
    """All tokens; the top k by part of the keys, a layer ahead (Lee et al., InfiniGen, section 4).

    ratio: r / d, the share of the skewed columns that is kept: those with the largest |QA|, summed over the prompt's
    queries of the GQA group. skew_path: a safetensors file that holds "skew" [L, H_kv, d, d], what `skew` gives for
    each layer on a sample text. Without a file A comes from each prompt's own queries, which fits it better than the
    paper's and costs one decomposition per KV head and layer of every prompt.

    All attended tokens are selected, whatever their scores (B-A2); there are neither sinks nor a window. A group's
    heads are softmaxed, then summed. The paper keeps the first layer whole: an option of the engine.
    """

    ratio: Share = 0.2
    skew_path: str = ""

    name = "infinigen"

    def split(self, plan: Plan) -> Plan:
        return plan.split()

    def num_queries(self, plan: Plan) -> int:
        return plan.num_prompt_tokens if plan.selects else 0

    def allocate(self, shape: CacheShape) -> InfiniGenIndex:
        """Raises ConfigError for a file that does not hold this model's skew."""
        num_columns = max(1, int(self.ratio * shape.head_dim))
        return InfiniGenIndex(
            keys=shape.seated(shape.max_model_len, num_columns, dtype=shape.dtype, tokens_each=1),
            columns=shape.seated(shape.head_dim, num_columns, dtype=torch.float32),
            skew=_read_skew(self.skew_path, shape) if self.skew_path else None,
        )

    def observe_prefill(self, index: InfiniGenIndex, prefilled: PrefilledLayer) -> None:
        seat, layer, keys, queries = prefilled.seat, prefilled.layer, prefilled.keys, prefilled.queries
        matrix = skew(queries, keys) if index.skew is None else index.skew[layer]
        grouped = queries.reshape(keys.shape[0], -1, keys.shape[2])
        size = torch.zeros_like(matrix[:, 0])
        for tile in _tiles(grouped):
            size += (tile.float() @ matrix).abs().sum(dim=1)
        order = size.argsort(dim=-1, descending=True, stable=True)[:, : index.columns.shape[-1]]
        columns = matrix.gather(2, order[:, None].expand(-1, matrix.shape[1], -1))
        index.columns[seat, layer] = columns
        first = 0
        for tile in _tiles(keys):
            last = first + tile.shape[1]
            index.keys[seat, layer, :, first:last] = tile.float() @ columns
            first = last

    def extend(self, index: InfiniGenIndex, leaving: Leaving) -> None:
        columns = leaving.at_layers(index.columns)[leaving.seats]
        leaving.write(index.keys, (leaving.read_keys().float()[..., None, :] @ columns).squeeze(-2))

    def score(self, index: InfiniGenIndex, candidates: Candidates) -> Tensor:
        layer, seats, num_positions = candidates.layer, candidates.seats, candidates.num_positions
        columns, at_layer = index.columns[:, layer][seats], index.keys[:, layer]
        batch, num_kv_heads, head_dim, num_columns = columns.shape
        query = candidates.queries.early().float().view(batch, num_kv_heads, -1, head_dim) @ columns
        scores = torch.empty(*query.shape[:3], num_positions, device=query.device)
        step = max(1, MAX_ELEMENTS // (batch * num_kv_heads * num_columns))
        for first in range(0, num_positions, step):
            span = slice(first, min(first + step, num_positions))
            scores[..., span] = query @ at_layer[:, :, span][seats].float().transpose(-1, -2)
        masked = candidates.outside()[:, None]
        scores = (scores * candidates.scale).masked_fill(masked[:, None], float("-inf"))
        return scores.softmax(dim=-1).sum(dim=2).masked_fill(masked, float("-inf"))


def skew(queries: Tensor, keys: Tensor) -> Tensor:
    """The matrix A of each KV head, orthogonal, so that (QA)(KA)^T is QK^T: float32 [H_kv, d, d].

    Its columns are the right singular vectors of the group's stacked queries, those first along which queries and keys
    together are longest. queries: [H_q, n, d]. keys: [H_kv, n, d]. Both rotated.
    """
    return skew_of(gram(queries.reshape(keys.shape[0], -1, keys.shape[2])), gram(keys))


def skew_of(of_queries: Tensor, of_keys: Tensor) -> Tensor:
    """`skew` from what `gram` gives for each KV head's queries and keys, or sums of it over texts."""
    # The eigenvectors of Q^T Q are the right singular vectors of Q; its values are their squares.
    squares, vectors = torch.linalg.eigh(of_queries)
    along = torch.einsum("hdi,hde,hei->hi", vectors, of_keys, vectors)
    order = (squares * along).argsort(dim=-1, descending=True, stable=True)
    return vectors.gather(2, order[:, None].expand_as(vectors)).float()


def gram(rows: Tensor) -> Tensor:
    """Inner products of the columns of [H, n, d]: float64 [H, d, d]."""
    total = rows.new_zeros(rows.shape[0], rows.shape[2], rows.shape[2], dtype=torch.float64)
    for tile in _tiles(rows):
        total += tile.float().transpose(1, 2) @ tile.float()
    return total


def _tiles(rows: Tensor) -> tuple[Tensor, ...]:
    return rows.split(max(1, MAX_ELEMENTS // (rows.shape[0] * rows.shape[2])), dim=1)


def _read_skew(path: str, shape: CacheShape) -> Tensor:
    try:
        with safe_open(path, framework="pt") as file:
            matrices = file.get_tensor("skew")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"InfiniGen's skew cannot be read from {path}: {error}") from error
    layers = range(shape.num_layers) if shape.layers is None else shape.layers
    num_layers = shape.num_layers if shape.layers is None else max(len(matrices), 1 + max(layers, default=0))
    expected = (num_layers, shape.num_kv_heads, shape.head_dim, shape.head_dim)
    if matrices.shape != expected:
        raise ConfigError(
            f"{path}: skew has shape {list(matrices.shape)}; this model needs {list(expected)}: calibrate again"
        )
    return matrices[[*layers]].to(shape.device, torch.float32)
