"""BitKeys: keys centred, rotated and rounded to two bits a coordinate choose the tokens; nothing is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from gpu_worker.kernels.attention import Rest
from gpu_worker.policies.base import CacheShape, Plan
from gpu_worker.policies.bitkeys.bit_rest import bit_rest, fit_values
from gpu_worker.policies.bitkeys.bit_score import bit_score
from gpu_worker.policies.bitkeys.bit_select import bit_select
from gpu_worker.policies.bitkeys.key_bits import (
    centre,
    code_leaving,
    code_prompt,
    num_code_bytes,
    padded_length,
)
from gpu_worker.policies.bitkeys.rotation import Rotation
from gpu_worker.policies.hyper_parameters import Between, OneOf, SplitShare
from gpu_worker.policies.recall import Candidates, IndexJob, Leaving, PrefilledLayer, RecallPolicy
from kv_store.client import BitParams

# Candidates of a prompt that values are fitted on, evenly spaced; all where there are not twice as many.
LEAST_FITTED = 8192


@dataclass(frozen=True, slots=True)
class BitIndex:
    """codes: uint8 [seats, L, H_kv, N, ceil(d/4)]; scales: float16 [seats, L, H_kv, N], both by position, N the
    `padded_length` of max_model_len. means: float32 [seats, L, H_kv, d], of the prompt's keys. sinks: float32
    [seats, L, H_kv, num_sink, d], their keys less the mean. With a fitted rest, else None: value_means, float32
    [seats, L, H_kv, d], and slopes, bfloat16 [seats, L, H_kv, d, d], as `fit_values` has them."""

    codes: Tensor
    scales: Tensor
    means: Tensor
    sinks: Tensor
    rotation: Rotation
    value_means: Tensor | None
    slopes: Tensor | None


@dataclass(frozen=True, slots=True)
class BitKeys(RecallPolicy[BitIndex]):
    """All tokens; the top k by keys of two bits a coordinate (Carrel's own).

    num_sink, recent_ratio: as for PQCache; the more is selected, the more of the attention weight is found. Codes are
    unbiased as RaBitQ's are (Gao and Long, SIGMOD 2024), and like those of a prompt, the codes of decoded tokens are of
    keys less the prompt's mean.
    rest: what is attended in place of the tokens that are not selected: "fitted", one row of the weight that a sample
    of the codes gives them, with the value that a linear fit of the prompt's values on its keys expects there; "none".
    """

    num_sink: Annotated[int, Between(1, 64)] = 4
    recent_ratio: SplitShare = 0.1
    rest: Annotated[str, OneOf(("none", "fitted"))] = "fitted"

    name = "bitkeys"
    needs_index_here = False

    def split(self, plan: Plan) -> Plan:
        return plan.split_by_ratio(self.num_sink, self.recent_ratio)

    def allocate(self, shape: CacheShape) -> BitIndex:
        length, head_dim = padded_length(shape.max_model_len), shape.head_dim
        return BitIndex(
            codes=shape.seated(length, num_code_bytes(head_dim), dtype=torch.uint8, tokens_each=1),
            scales=shape.seated(length, dtype=torch.float16, tokens_each=1),
            means=shape.seated(head_dim, dtype=torch.float32),
            sinks=shape.seated(self.num_sink, head_dim, dtype=torch.float32),
            rotation=Rotation.of(head_dim, shape.device),
            value_means=shape.seated(head_dim, dtype=torch.float32) if self.stands_in else None,
            slopes=shape.seated(head_dim, head_dim, dtype=torch.bfloat16) if self.stands_in else None,
        )

    def observe_prefill(self, index: BitIndex, prefilled: PrefilledLayer) -> None:
        plan, keys = prefilled.plan, prefilled.keys
        if not plan.selects:
            return
        place = prefilled.seat, prefilled.layer
        means, num_sink = index.means[place], plan.num_sink
        centre(keys, means, index.sinks[place][:, :num_sink])
        coded = keys[:, : self.window_begin(plan, keys.shape[1])]
        code_prompt(coded, means, index.rotation.matrix, index.codes[place], index.scales[place])
        if index.value_means is not None and index.slopes is not None:
            num_candidates = coded.shape[1] - num_sink
            fitted = slice(num_sink, coded.shape[1], max(1, num_candidates // LEAST_FITTED))
            fit_values(
                keys[:, fitted],
                prefilled.values[:, fitted],
                means,
                index.value_means[place],
                index.slopes[place],
            )

    def store_job(self, plan: Plan, begin: int, end: int) -> IndexJob:
        # Sinks and window too: keys are coded less the mean of all, and sinks count in what weights sum to.
        return IndexJob(0, end + plan.num_recent, BitParams(plan.num_sink))

    def extend(self, index: BitIndex, leaving: Leaving) -> None:
        code_leaving(
            leaving.read_keys(),
            leaving.at_layers(index.means),
            index.rotation.matrix,
            leaving.at_layers(index.codes),
            leaving.at_layers(index.scales),
            leaving.seats,
            leaving.positions,
        )

    def select(self, index: BitIndex, candidates: Candidates, counts: Tensor, width: int) -> Tensor:
        problem = _problem(index, candidates)
        return bit_select(*problem, counts, width, candidates.num_positions, candidates.scale)

    @property
    def stands_in(self) -> bool:
        return self.rest == "fitted"

    def stand_in(self, index: BitIndex, candidates: Candidates, selected: Tensor, rest: Rest) -> None:
        assert index.value_means is not None
        assert index.slopes is not None
        layer = candidates.layer
        bit_rest(
            candidates.query,
            index.rotation.matrix,
            index.codes[:, layer],
            index.scales[:, layer],
            index.means[:, layer],
            index.value_means[:, layer],
            index.slopes[:, layer],
            candidates.seats,
            candidates.begin,
            candidates.end,
            selected,
            candidates.scale,
            rest,
        )

    def score(self, index: BitIndex, candidates: Candidates) -> Tensor:
        return bit_score(*_problem(index, candidates), candidates.scale, candidates.num_positions)


def _problem(
    index: BitIndex, candidates: Candidates
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the arguments that both kernels take for one layer, in their order."""
    layer = candidates.layer
    return (
        candidates.query,
        index.rotation.matrix,
        index.codes[:, layer],
        index.scales[:, layer],
        index.sinks[:, layer],
        candidates.seats,
        candidates.begin,
        candidates.end,
    )
