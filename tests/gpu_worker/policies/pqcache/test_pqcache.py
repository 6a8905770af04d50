"""PQCache: what is loaded and coded is what is scored."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from engine_rig import Rig, request
from policy_index import SHAPE, poison, pq_segment, queries_of, select
from torch import Tensor

from gpu_worker.kernels.top_k import top_k
from gpu_worker.policies.pqcache.policy import PQCache, PQIndex
from gpu_worker.policies.recall import Candidates, IndexJob, Leaving, TrainedSegment
from kv_store.client import PQParams

POLICY = PQCache(num_subvectors=2, num_bits=3, num_sink=4)
HEADS, DIM = SHAPE.num_kv_heads, SHAPE.head_dim


def job(begin: int, end: int) -> IndexJob:
    return IndexJob(begin, end, PQParams(2, 3))


def books(seed: int) -> Tensor:
    return torch.randn(HEADS, 2, 8, DIM // 2, generator=torch.Generator().manual_seed(seed))


def new_index() -> PQIndex:
    index = POLICY.allocate(SHAPE)
    poison(index)
    return index


def random_codes(num_tokens: int, seed: int) -> Tensor:
    shape = (HEADS, num_tokens, 2)
    return torch.randint(0, 8, shape, generator=torch.Generator().manual_seed(seed)).to(torch.uint8)


def leave(index: PQIndex, seat: int, layers: range, position: int, keys: Tensor) -> None:
    """Code one token, keys [L, HEADS, d], beside a row of padding."""
    seats, positions = torch.tensor([(seat + 1) % 3, seat]), torch.tensor([-1, position])
    both = torch.stack([torch.full_like(keys, float("nan")), keys])
    POLICY.extend(index, Leaving(seats, layers, positions, lambda: both))


@pytest.mark.parametrize("max_model_len", [1, 64, 101])
def test_codes_of_every_head_are_read_in_vectors_whatever_the_longest_sequence_is(max_model_len: int) -> None:
    """16 pairs of codes from one multiple of 32 bytes to the next: what Triton takes for aligned."""
    codes = PQCache(num_sink=4).allocate(replace(SHAPE, max_model_len=max_model_len)).codes
    assert codes.shape[3] >= max_model_len
    assert all(codes.stride(dim) % 32 == 0 for dim in range(3))


@pytest.mark.parametrize("num_subvectors", [1, 2, 4])
def test_what_is_selected_are_the_best_by_their_scores(num_subvectors: int) -> None:
    """With two parts the selection goes by a table of code pairs, with others by every token's score."""
    policy = PQCache(num_subvectors=num_subvectors, num_bits=3, num_sink=4)
    index = policy.allocate(SHAPE)
    poison(index)
    generator = torch.Generator().manual_seed(num_subvectors)
    spans = {2: (4, 90), 0: (2, 33)}
    for seat, (begin, end) in spans.items():
        shape = (HEADS, num_subvectors, 8, DIM // num_subvectors)
        codes = torch.randint(0, 8, (HEADS, end - 1 - begin, num_subvectors), generator=generator)
        segment = pq_segment(torch.randn(shape, generator=generator), codes.to(torch.uint8))
        policy.load(
            index, TrainedSegment(seat, 1, IndexJob(begin, end - 1, PQParams(num_subvectors, 3)), segment)
        )
        keys = torch.randn(1, 1, HEADS, DIM, generator=generator)
        leaving = Leaving(torch.tensor([seat]), range(1, 2), torch.tensor([end - 1]), lambda keys=keys: keys)
        policy.extend(index, leaving)
    query = torch.randn(2, 4, DIM, generator=generator)
    begin, end = torch.tensor(list(spans.values())).T
    candidates = Candidates(1, queries_of(query), torch.tensor(list(spans)), begin, end, 100, SHAPE.scale)
    counts = torch.tensor([9, 20])
    expected = top_k(policy.score(index, candidates), counts, 24)
    assert torch.equal(policy.select(index, candidates, counts, 24), expected)


def one_part_index(codebook: Tensor) -> tuple[PQCache, PQIndex]:
    """A policy by inner product with one part, and its index with this codebook [2, DIM + 1] in all heads, phi 4."""
    policy = PQCache(num_subvectors=1, num_bits=1, num_sink=4, metric="ip")
    index = policy.allocate(SHAPE)
    poison(index)
    segment = pq_segment(
        codebook.expand(HEADS, 1, 2, -1), torch.tensor([0, 1] * 23)[None, :, None].expand(HEADS, -1, 1)
    )
    params = PQParams(1, 1, 0, "ip")
    segment["max_square_norms"] = torch.full((HEADS, 1), 4.0)
    policy.load(index, TrainedSegment(1, 1, IndexJob(4, 50, params), segment))
    return policy, index


def along_axis(length: float) -> Tensor:
    key = torch.zeros(1, HEADS, DIM)
    key[..., 0] = length
    return key


@pytest.mark.parametrize(
    ("length", "code"),
    [
        # (1.6 - 1)^2 + (1.2 - 3^0.5)^2 = 0.64 is less than (2 - 1.6)^2 + 1.2^2 = 1.6, though 2 is nearer to 1.6 than 1
        (1.6, 0),
        (2.0, 1),
        # 9 is beyond phi: 1 against 4 + 3
        (3.0, 1),
    ],
)
def test_by_inner_product_leaving_tokens_are_coded_with_their_added_coordinate(
    length: float, code: int
) -> None:
    codebook = torch.zeros(2, DIM + 1)
    codebook[0, 0], codebook[0, -1] = 1.0, 3**0.5
    codebook[1, 0] = 2.0
    policy, index = one_part_index(codebook)
    seats, positions = torch.tensor([0, 1]), torch.tensor([-1, 50])
    keys = torch.stack([torch.full((1, HEADS, DIM), float("nan")), along_axis(length)])
    policy.extend(index, Leaving(seats, range(1, 2), positions, lambda: keys))
    assert index.codes[1, 1, :, 50, 0].tolist() == [code] * HEADS


def test_by_inner_product_scores_leave_the_added_coordinate_out() -> None:
    codebook = torch.zeros(2, DIM + 1)
    # Their added coordinates are in the other order than their products with the query.
    codebook[0, 0], codebook[0, -1] = 1.0, 100.0
    codebook[1, 0] = 2.0
    policy, index = one_part_index(codebook)
    query = torch.zeros(1, 4, DIM)
    query[..., 0] = 1.0
    assert select(policy, index, query, {1: (4, 50)}, layer=1, k=2) == [[[47, 49]] * HEADS]


def test_what_is_trained_by_inner_product_is_loaded_and_extended() -> None:
    policy = PQCache(num_subvectors=2, num_bits=3, num_sink=4, metric="ip")
    index = policy.allocate(SHAPE)
    poison(index)
    keys = torch.randn(HEADS, 200, DIM, generator=torch.Generator().manual_seed(0))
    trained = policy.prompt_job(policy.plan(300, 60), 4, 204)
    policy.load(index, TrainedSegment(1, 1, trained, policy.train(keys, trained, seed=0)))
    # What is trained and what leaves is coded alike.
    for token in range(0, 200, 20):
        one = keys[:, token][None, None]
        leaving = Leaving(torch.tensor([1]), range(1, 2), torch.tensor([204]), lambda one=one: one)
        policy.extend(index, leaving)
        assert torch.equal(index.codes[1, 1, :, 204], index.codes[1, 1, :, 4 + token])


def test_layers_before_the_first_recalled_one_are_left_alone() -> None:
    index, seat = new_index(), 0
    POLICY.load(index, TrainedSegment(seat, 1, job(4, 50), pq_segment(books(1), random_codes(46, 1))))
    keys = torch.randn(1, HEADS, 2, DIM)
    for token in range(2):
        leave(index, seat, range(1, 2), 50 + token, keys[:, :, token])
    assert (index.codes[seat, 0] == 113).all()
    assert (index.codes[seat, 1, :, 50:52] < 8).all()
    assert (index.codes[[1, 2]] == 113).all()


def test_weights_over_all_that_is_attended_find_the_best_of_the_groups_heads() -> None:
    """Every key is a centroid of its own, so that scores are exact but for the softmax's sum."""
    found = {}
    for normalize in ("candidates", "all"):
        policy = PQCache(num_subvectors=1, num_bits=6, num_sink=4, normalize=normalize)
        rig = Rig(policies={"pqcache": policy}, tokens_per_slab=256)
        asked = request("one", "pqcache", 40, prompt=86, max_tokens=4, measure=True)
        found[normalize] = rig.run(asked)[0].usage.recall_rate
    assert found["candidates"] < 0.95 < found["all"]
