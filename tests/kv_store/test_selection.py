"""The store selects by its own indexes, also among tokens that came after they were trained, and sends rows along."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from store_samples import LAYOUT, filled, keys_of
from waiting import PATIENCE

from kv_store.client import (
    InvalidStoreRequest,
    KMeansParams,
    NotInStore,
    PQParams,
    StoreClient,
    TopKWanted,
)

Connect = Callable[..., StoreClient]

NUM_TOKENS, BEGIN, TRAINED, SCALE = 150, 5, 100, 0.3
HEADS, GROUP = LAYOUT.num_kv_heads, 3
QUERIES = (
    np.random.default_rng(1).standard_normal((HEADS, GROUP, LAYOUT.row_format.head_dim)).astype(np.float32)
)


def best(weights: np.ndarray, k: int) -> np.ndarray:
    """Positions of the largest weights [H, n], ascending; a tie goes to the later one."""
    return np.stack([np.sort(np.lexsort((np.arange(of.size), of))[::-1][:k]) for of in weights]) + BEGIN


def attention(keys: np.ndarray) -> np.ndarray:
    """Softmax weights of keys [H, n, d], summed over each group."""
    logits = np.einsum("hgd,hnd->hgn", QUERIES, keys).astype(np.float64) * SCALE
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True)).sum(1)


@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_pq_selects_among_later_tokens_too(connect: Connect, metric: str) -> None:
    # The arrays are read where the arena is mapped; the selection is the same for everyone.
    client = connect(transport="zero_copy")
    keys = keys_of(LAYOUT, filled(client, NUM_TOKENS))
    index = client.build_index("a", 1, BEGIN, TRAINED, PQParams(2, 4, 6, metric), seed=3).result(PATIENCE)
    books, parts = index.arrays["codebooks"], np.split(keys[:, BEGIN:], 2, axis=-1)
    coded = []
    for part, of_part in enumerate(parts):
        vectors = of_part
        if metric == "ip":
            room = index.arrays["max_square_norms"][:, part, None] - np.square(of_part).sum(-1)
            vectors = np.concatenate([of_part, np.sqrt(room.clip(min=0))[..., None]], axis=-1)
        distance = np.square(vectors[:, :, None] - books[:, part][:, None]).sum(-1)
        codes = distance.argmin(-1)
        assert (codes[:, : TRAINED - BEGIN] == index.arrays["codes"][..., part]).all()
        coded.append(np.take_along_axis(books[:, part], codes[..., None], 1)[..., : of_part.shape[-1]])
    for end in (TRAINED, TRAINED + 1, TRAINED + 30, NUM_TOKENS, TRAINED + 7):
        near = np.concatenate(coded, axis=-1)[:, : end - BEGIN]
        (found,), _ = client.top_k(1, [TopKWanted("a", BEGIN, end, 20, QUERIES)], SCALE)
        assert (found == best(attention(near), 20)).all()


@pytest.mark.parametrize("metric", ["cosine", "l2", "ip"])
def test_clusters_of_several_indexes_are_taken_whole(connect: Connect, metric: str) -> None:
    client = connect(transport="zero_copy")
    filled(client, NUM_TOKENS)
    ends = [BEGIN, 60, TRAINED, 140]
    segments = [
        client.build_index("a", 0, begin, end, KMeansParams(6, metric, 4), seed=begin).result(PATIENCE)
        for begin, end in itertools.pairwise(ends)
    ]
    for count, end in ((1, 60), (2, TRAINED), (3, 140)):
        for k in (1, 17, 50, 1000):
            (found,), _ = client.top_k(0, [TopKWanted("a", BEGIN, end, k, QUERIES)], SCALE)
            for head in range(HEADS):
                clusters = []
                for begin, segment in zip(ends, segments[:count], strict=False):
                    scores = segment.arrays["centroids"][head] @ QUERIES[head].sum(0)
                    members = [np.flatnonzero(segment.arrays["labels"][head] == c) + begin for c in range(6)]
                    clusters += list(zip(scores, members, strict=True))
                ranked = [members for _, members in sorted(clusters, key=lambda each: -each[0])]
                assert found[head].tolist() == sorted(np.concatenate(ranked)[:k].tolist())


@pytest.mark.parametrize("transport", ["zero_copy", "shm", "grpc"])
def test_rows_come_along_for_what_the_worker_does_not_have(
    connect: Connect, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect(transport=transport)
    rows = {name: filled(client, NUM_TOKENS, name, seed) for seed, name in enumerate("ab")}
    for name in rows:
        built = client.build_index(name, 1, BEGIN, TRAINED, PQParams(2, 4, 6)).result(PATIENCE)
        # Who does not map the arena gets no arrays: the index stays in the store.
        assert bool(built.arrays) is not client.selects_in_store
    resident = np.random.default_rng(5).random((HEADS, 120 - BEGIN)) < 0.6
    wanted = [
        TopKWanted("a", BEGIN, 120, 30, QUERIES, resident),
        TopKWanted("b", BEGIN, TRAINED, 200, -QUERIES),
        TopKWanted("b", BEGIN, TRAINED, 4, QUERIES, np.zeros((HEADS, TRAINED - BEGIN), bool)),
        TopKWanted("b", BEGIN, TRAINED, 0, QUERIES, np.zeros((HEADS, TRAINED - BEGIN), bool)),
    ]
    positions, found = client.top_k(1, wanted, SCALE)
    alone = [client.top_k(1, [each], SCALE)[0][0] for each in wanted]
    assert [each.tolist() for each in positions] == [each.tolist() for each in alone]
    assert [each.shape[1] for each in positions] == [30, TRAINED - BEGIN, 4, 0]
    # Sequences that no one message can carry go in several.
    monkeypatch.setattr("kv_store.client.selection.MAX_MESSAGE_BYTES", 600)
    apart, their_rows = client.top_k(1, wanted, SCALE)
    assert [each.tolist() for each in apart] == [each.tolist() for each in alone]
    assert (their_rows == found).all()
    # All candidates, where more are asked for.
    assert positions[1].tolist() == [list(range(BEGIN, TRAINED))] * HEADS
    expected = [
        rows["a"][head, [at for at in positions[0][head] if not resident[head, at - BEGIN]]]
        for head in range(HEADS)
    ] + [rows["b"][head, positions[2][head]] for head in range(HEADS)]
    assert (found == np.concatenate(expected)).all()
    # Each was asked for three times, with rows to be sent in two of the calls.
    times = client.stats().times
    assert sum(times.index_search.counts) == 3 * len(wanted)
    assert times.index_search.sum > 0


def test_a_selection_that_cannot_be_made_is_refused_and_holds_nothing(connect: Connect) -> None:
    client = connect()
    filled(client, NUM_TOKENS)
    client.build_index("a", 0, BEGIN, TRAINED, PQParams(2, 4)).result(PATIENCE)
    client.build_index("a", 0, TRAINED, 120, KMeansParams(4)).result(PATIENCE)
    client.build_index("a", 1, BEGIN, TRAINED, KMeansParams(4)).result(PATIENCE)
    filled(client, 40, "coarse")
    client.build_index("coarse", 0, 0, 40, PQParams(2, 4, codebooks_only=True)).result(PATIENCE)
    used = client.stats().reserved_bytes
    held = np.zeros((HEADS, 3), bool)
    for layer, name, begin, end, k, queries, resident, message in (
        (0, "a", BEGIN, NUM_TOKENS + 1, 3, QUERIES, None, "sealed tokens"),
        (0, "a", BEGIN, BEGIN, 3, QUERIES, None, "must not be empty"),
        (0, "a", BEGIN + 1, TRAINED, 3, QUERIES, None, "no index .* begins at token 6"),
        (1, "a", BEGIN, NUM_TOKENS, 3, QUERIES, None, "in no kmeans index"),
        (9, "a", BEGIN, TRAINED, 3, QUERIES, None, "layer 9"),
        (0, "a", BEGIN, TRAINED, -1, QUERIES, None, "cannot be sent"),
        (0, "a", BEGIN, TRAINED, 3, QUERIES[:1, :1, :5], None, "bytes of queries"),
        (0, "a", BEGIN, TRAINED, 3, QUERIES * np.nan, None, "NaN"),
        (0, "a", BEGIN, TRAINED, 3, QUERIES, held, "`resident`"),
        (0, "coarse", 0, 40, 3, QUERIES, None, "no codes to search"),
    ):
        with pytest.raises(InvalidStoreRequest, match=message):
            client.top_k(layer, [TopKWanted(name, begin, end, k, queries, resident)], SCALE)
    for other in (client, connect("v")):
        with pytest.raises(NotInStore):
            other.top_k(0, [TopKWanted("b", BEGIN, TRAINED, 3, QUERIES)], SCALE)
    client.end("coarse")
    client.end("a")
    assert client.stats().reserved_bytes < used
    assert client.stats().num_indexes == 0


def test_an_index_that_was_built_again_takes_the_place_of_the_first(connect: Connect) -> None:
    client = connect()
    filled(client, NUM_TOKENS)
    wanted = [TopKWanted("a", BEGIN, TRAINED, 20, QUERIES)]
    selections = []
    for seed in (1, 2, 1):
        client.build_index("a", 0, BEGIN, TRAINED, PQParams(2, 4, 1), seed=seed).result(PATIENCE)
        selections.append(client.top_k(0, wanted, SCALE)[0][0].tolist())
    assert selections[0] == selections[2] != selections[1]


@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_a_scale_that_is_no_number_is_refused(connect: Connect, scale: float) -> None:
    client = connect(transport="zero_copy")
    filled(client, NUM_TOKENS)
    client.build_index("a", 1, BEGIN, TRAINED, PQParams(2, 4)).result(PATIENCE)
    with pytest.raises(InvalidStoreRequest, match="scale"):
        client.top_k(1, [TopKWanted("a", BEGIN, TRAINED, 20, QUERIES)], scale)


def test_queries_whose_scores_overflow_have_as_many_as_others(connect: Connect) -> None:
    client = connect(transport="zero_copy")
    filled(client, NUM_TOKENS)
    client.build_index("a", 1, BEGIN, TRAINED, PQParams(2, 4)).result(PATIENCE)
    wanted = TopKWanted("a", BEGIN, TRAINED, 20, np.full_like(QUERIES, 3e38))
    (found,), _ = client.top_k(1, [wanted], SCALE)
    assert found.shape == (LAYOUT.num_kv_heads, 20)
