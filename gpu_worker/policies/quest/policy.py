"""Quest: an upper bound of every page's inner products chooses the pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from gpu_worker.policies.base import CacheShape, Plan
from gpu_worker.policies.hyper_parameters import Between
from gpu_worker.policies.quest.page_bound import page_bound
from gpu_worker.policies.recall import Candidates, Leaving, PrefilledLayer, RecallPolicy


@dataclass(frozen=True, slots=True)
class QuestIndex:
    """key_min, key_max: [seats, L, H_kv, P, d] in the keys' dtype, the least and largest value of a channel among the
    candidates of a page."""

    key_min: Tensor
    key_max: Tensor


@dataclass(frozen=True, slots=True)
class Quest(RecallPolicy[QuestIndex]):
    """All tokens; whole pages by the extremes of each channel (Tang et al., Quest, section 3).

    page_size: tokens of a page; page p is of the positions from p * page_size on.

    A token scores as its page does, so that whole pages are taken. The window has what they leave, a page at least, as
    the paper always attends the last page. There are no sinks. Of pages that tie the later goes first, whole. One page
    is cut, to its most recent tokens, when the open page, of which only a part has left the window, is among the best.
    """

    page_size: Annotated[int, Between(1, 4096)] = 16

    name = "quest"

    def split(self, plan: Plan) -> Plan:
        num_pages = max(0, plan.num_kept // self.page_size - 1)
        return plan.split(num_recent=plan.num_kept - num_pages * self.page_size)

    def allocate(self, shape: CacheShape) -> QuestIndex:
        num_pages = -(-shape.max_model_len // self.page_size)
        return QuestIndex(
            key_min=shape.seated(num_pages, shape.head_dim, dtype=shape.dtype, tokens_each=self.page_size),
            key_max=shape.seated(num_pages, shape.head_dim, dtype=shape.dtype, tokens_each=self.page_size),
        )

    def observe_prefill(self, index: QuestIndex, prefilled: PrefilledLayer) -> None:
        """A page that the window cuts has the extremes of its candidates only; `extend` adds the others."""
        seat, layer, keys = prefilled.seat, prefilled.layer, prefilled.keys
        end = self.window_begin(prefilled.plan, keys.shape[1])
        num_full = end // self.page_size
        pages = keys[:, : num_full * self.page_size].unflatten(1, (num_full, self.page_size))
        index.key_min[seat, layer, :, :num_full] = pages.amin(dim=2)
        index.key_max[seat, layer, :, :num_full] = pages.amax(dim=2)
        if end % self.page_size:
            opened = keys[:, num_full * self.page_size : end]
            index.key_min[seat, layer, :, num_full] = opened.amin(dim=1)
            index.key_max[seat, layer, :, num_full] = opened.amax(dim=1)

    def extend(self, index: QuestIndex, leaving: Leaving) -> None:
        keys = leaving.read_keys()
        is_first = (leaving.positions % self.page_size == 0)[:, None, None, None]
        for extremes, wider in ((index.key_min, torch.minimum), (index.key_max, torch.maximum)):
            new = keys.where(is_first, wider(leaving.read(extremes, self.page_size), keys))
            leaving.write(extremes, new, self.page_size)

    def score(self, index: QuestIndex, candidates: Candidates) -> Tensor:
        layer, begin, end = candidates.layer, candidates.begin, candidates.end
        num_pages = -(-candidates.num_positions // self.page_size)
        bounds = page_bound(
            candidates.query,
            index.key_min[:, layer],
            index.key_max[:, layer],
            candidates.seats,
            begin // self.page_size,
            (end + self.page_size - 1) // self.page_size,
            num_pages,
        )
        return by_token(bounds, self.page_size, candidates)


def by_token(scores: Tensor, page_size: int, candidates: Candidates) -> Tensor:
    """Every candidate's page's score: float32 [B, H_kv, N] of [B, H_kv, P], -inf for what is no candidate."""
    wide = scores[..., None].expand(*scores.shape, page_size).flatten(-2)[..., : candidates.num_positions]
    return wide.masked_fill(candidates.outside()[:, None], float("-inf"))
