"""Decode steps of a warm-up: batches of padding, of the shapes that later batches are padded to."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import combinations

from gpu_worker.errors import CapacityError
from gpu_worker.policies.base import Family
from gpu_worker.policies.registry import AUTO, LONG, SHORT
from gpu_worker.runner.steps.graphs import MAX_PREPARED
from gpu_worker.startup.assemble import Assembled
from gpu_worker.startup.warm.warm_requests import warm_request
from gpu_worker.state.sequence import Sequence

logger = logging.getLogger(__name__)

# Of a batch of one kind, so many sizes and the largest.
NUM_SIZES = 5
# Lanes of two kinds, or three: the likeliest first. What is more is padded to the largest of each.
PAIRS = (8, 4), (2, 1), (16, 4)
TRIPLE = 8, 4, 4
# Tokens up to which steps are compiled for one length.
ONE_LENGTH = 8192


@dataclass(frozen=True, slots=True)
class Kind:
    """Sequences that are served alike: policy, and whether selected tokens may be in the arena only."""

    policy: str
    can_miss: bool = False


@dataclass(frozen=True, slots=True)
class Steps:
    """A step of a batch of so many lanes of each kind, all of the greatest length: shorter sequences and smaller
    batches are served by it too. captures: or it is compiled only, as of graphs that stay there are so many."""

    lanes: tuple[tuple[Kind, int], ...]
    captures: bool = True

    def run(self, worker: Assembled, is_over: Callable[[], bool]) -> None:
        """Changes nothing that any sequence has."""
        length = worker.engine.info.max_model_len
        try:
            worker.runner.decode.prepare(
                [one for kind, count in self.lanes for one in [_stand_in(worker, kind, length)] * count],
                self.captures,
            )
        except CapacityError as error:
            logger.info("no room to warm up %s: %s", self, error)


@dataclass(frozen=True, slots=True)
class ShorterSteps:
    """A step of one sequence that selects, of each size that is compiled by itself, below the greatest length: a batch
    that gets a step of its own later does not wait for compilers."""

    policy: str

    def run(self, worker: Assembled, is_over: Callable[[], bool]) -> None:
        """As `Steps.run`. Nothing is captured."""
        length = ONE_LENGTH
        while length < worker.engine.info.max_model_len and not is_over():
            try:
                worker.runner.decode.prepare([_stand_in(worker, Kind(self.policy), length)], captures=False)
            except CapacityError as error:
                logger.info("no room to warm up a step of %d tokens: %s", length, error)
            length *= 2


def step_stages(worker: Assembled) -> list[Steps | ShorterSteps]:
    """Return the steps of the server's policy if it recalls, of the policy that `auto` stands for, and of `full`."""
    default = worker.engine.info.default_policy
    selecting = dict.fromkeys((LONG if default == AUTO else default, LONG))
    found = {policy: kinds for policy in selecting if (kinds := _kinds(worker, policy))}
    every = [Kind(SHORT), *(kind for kinds in found.values() for kind in kinds)]
    lanes = batches(every, _sizes(worker), worker.runner.caches.num_long)
    return [*map(Steps, lanes), *map(ShorterSteps, found)]


def policy_steps(worker: Assembled, policy: str) -> list[Steps | ShorterSteps]:
    """Return the steps of another policy, alone and together with `full`. Nothing is captured."""
    sizes, kinds = _sizes(worker), _kinds(worker, policy)
    most, found = worker.runner.caches.num_long, list[Steps | ShorterSteps]()
    for kind in kinds:
        some = dict.fromkeys((most, *(size for size in sizes[:NUM_SIZES] if size <= most)))
        found += [Steps(((kind, size),), captures=False) for size in some]
        found.append(Steps(((Kind(SHORT), sizes[-1]), (kind, most)), captures=False))
    return [*found, *([ShorterSteps(policy)] if kinds else [])]


def batches(kinds: Items[Kind], sizes: Items[int], num_long: int) -> list[tuple[tuple[Kind, int], ...]]:
    """Lanes of each kind in the batches that steps are prepared for, the likeliest first: of one kind, of every two
    and three. sizes: that batches are padded to, ascending. num_long: lanes of the greatest length that select at once.
    Any mix that fits the largest size fits one of these."""
    most = sizes[-1]
    found: dict[tuple[tuple[Kind, int], ...], None] = {}

    def add(some: Items[Kind], lanes: Items[int]) -> None:
        limits = (most if kind.policy == SHORT else min(most, num_long) for kind in some)
        found[tuple(zip(some, map(min, lanes, limits), strict=True))] = None

    ones, pairs, triples = (list[Items[Kind]](combinations(kinds, size)) for size in (1, 2, 3))
    for some in (*ones, *pairs, *triples):
        add(some, [most] * len(some))
    for size in sizes[:NUM_SIZES]:
        for some in ones:
            add(some, [size])
    for lanes in PAIRS:
        for some in pairs:
            add(some, lanes)
    for some in triples:
        add(some, TRIPLE)
    return list(found)[:MAX_PREPARED]


def _sizes(worker: Assembled) -> list[int]:
    """That batches are padded to."""
    buckets, most = worker.runner.caches.buckets, worker.engine.info.max_num_seqs
    return sorted({min(buckets.lanes(size), most) for size in range(1, most + 1)})


def _kinds(worker: Assembled, policy: str) -> list[Kind]:
    """None of a policy that selects at no step, or not on the device."""
    if worker.runner.offloader.client.selects_in_store:
        # The host takes part in every step that selects.
        return []
    sequence = _stand_in(worker, Kind(policy), worker.engine.info.max_model_len)
    if sequence.policy.family is not Family.RECALL or not sequence.plan.selects:
        return []
    return [Kind(policy)] if sequence.plan.all_resident else [Kind(policy), Kind(policy, can_miss=True)]


def _stand_in(worker: Assembled, kind: Kind, length: int) -> Sequence:
    """A sequence of this length that holds nothing."""
    request = warm_request(worker, "warm-up", kind.policy, (0,) * (length - 1), 1)
    worker.engine.submit(request, lambda event: None)
    sequence = worker.runner.sequences[request.request_id]
    worker.engine.abort(request.request_id)
    sequence.num_tokens = length - 1
    sequence.window_begin = sequence.policy.window_begin(sequence.plan, sequence.num_tokens)
    sequence.num_slots = 0 if kind.can_miss else sequence.capacity
    return sequence
