"""Which tokens the engine gives: those of a naive decoder, whatever runs beside and however memory is cut."""

from __future__ import annotations

import pytest
import torch
from engine_rig import (
    NUM_KV_HEADS,
    Rig,
    make_model,
    random_prompt,
    request,
    small_policies,
    tokens_alone,
)
from naive_decoder import first_best, greedy
from torch import Tensor

from gpu_worker.caches import HotCacheSize
from gpu_worker.policies.oracle.policy import Oracle
from gpu_worker.policies.recall import Candidates

SELECTING = ["oracle", "pqcache", "clusterkv"]
LEAST = HotCacheSize(tokens=1)
# One process runs the file, and makes what several tests compare with once.
pytestmark = pytest.mark.xdist_group("engine_tokens")


@pytest.fixture(scope="module")
def dense() -> list[int]:
    return greedy(make_model(), random_prompt(120), 50)[0]


def test_the_model_is_lively_enough_to_tell_tokens_apart(dense: list[int]) -> None:
    assert len(set(dense)) > 10
    narrow = tokens_alone(request("narrow", "pqcache", 0.1, max_tokens=50))
    assert narrow != dense


@pytest.mark.parametrize("chunk", [1, 7, 119, 500])
def test_full_gives_the_naive_tokens_at_any_chunk_size(chunk: int, dense: list[int]) -> None:
    assert Rig(prefill_chunk=chunk).tokens(request("full", max_tokens=50)) == dense


def test_the_oracle_attends_sinks_window_and_the_exact_best() -> None:
    def attended(layer: int, kv_head: int, queries: Tensor, keys: Tensor) -> list[int]:
        # 30 tokens: 4 sinks, half of the other 26 recent, half by weight.
        end = len(keys) - 1 - 13
        weights = (queries @ keys.T * keys.shape[1] ** -0.5).softmax(-1).sum(0)
        return [*range(4), *first_best(weights[4:end], 13, 4), *range(end, len(keys))]

    expected = greedy(make_model(), random_prompt(120), 50, attended)[0]
    assert tokens_alone(request("one", "oracle", 30, max_tokens=50)) == expected


@pytest.mark.parametrize("hot_cache", [HotCacheSize(), LEAST])
def test_pqcache_attends_the_best_by_its_codes(hot_cache: HotCacheSize) -> None:
    rig = Rig(hot_cache=hot_cache, tokens_per_slab=256)
    tokens = rig.tokens(request("one", "pqcache", 30, max_tokens=60))
    known: dict[tuple[int, int], list[list[int]]] = {}

    def attended(layer: int, kv_head: int, queries: Tensor, keys: Tensor) -> list[int]:
        arrays = rig.store.segments["one", layer, 4].arrays
        books = torch.tensor(arrays["codebooks"][kv_head])
        codes = known.setdefault((layer, kv_head), arrays["codes"][kv_head].tolist())
        end = len(keys) - 1 - 13
        for position in range(4 + len(codes), end):
            parts = keys[position].view(2, 1, -1)
            codes.append((books - parts).square().sum(-1).argmin(-1).tolist())
        # One product per code, so that tokens of equal codes are exactly equal.
        table = torch.einsum("gpd,pcd->gpc", queries.view(len(queries), 2, -1), books)
        logits = sum(table[:, part, [code[part] for code in codes]] for part in range(2))
        weights = (logits * keys.shape[1] ** -0.5).softmax(-1).sum(0)
        return [*range(4), *first_best(weights, 13, 4), *range(end, len(keys))]

    # 103 tokens are coded at prefill, one more at every step after the first.
    assert tokens == greedy(make_model(), random_prompt(120), 60, attended)[0]
    assert len(known[0, 0]) == 103 + 58
    assert rig.records["one"].usage.attended_tokens == 30


@pytest.mark.parametrize("hot_cache", [HotCacheSize(), LEAST])
def test_clusterkv_attends_whole_clusters_also_of_decoded_windows(hot_cache: HotCacheSize) -> None:
    rig = Rig(hot_cache=hot_cache, tokens_per_slab=256)
    tokens = rig.tokens(request("one", "clusterkv", 30, max_tokens=110))

    def attended(layer: int, kv_head: int, queries: Tensor, keys: Tensor) -> list[int]:
        past = len(keys) - 1
        end = past - (past - 120) % 40
        clusters: list[tuple[float, list[int]]] = []
        for begin in [4, *range(120, end, 40)]:
            arrays = rig.store.segments["one", layer, begin].arrays
            centroids, labels = torch.tensor(arrays["centroids"][kv_head]), arrays["labels"][kv_head]
            for cluster, centroid in enumerate(centroids):
                members = [begin + place for place in (labels == cluster).nonzero()[0].tolist()]
                clusters.append((float(queries.sum(0) @ centroid), members))
        clusters.sort(key=lambda one: -one[0])
        selected = [position for _, members in clusters for position in members][:26]
        return [*range(4), *sorted(selected), *range(end, len(keys))]

    assert tokens == greedy(make_model(), random_prompt(120), 110, attended)[0]
    assert sorted(begin for _, layer, begin in rig.store.segments if layer == 0) == [4, 120, 160]
    usage = rig.records["one"].usage
    assert usage.attended_tokens == 30
    assert usage.window_tokens == pytest.approx(sum(step % 40 for step in range(109)) / 109)


@pytest.mark.parametrize("num_prefill", [1, 60, 119, 120])
def test_full_gives_the_same_tokens_when_part_of_the_prompt_is_decoded(
    num_prefill: int, dense: list[int]
) -> None:
    rig = Rig()
    assert rig.tokens(request("one", max_tokens=50, num_prefill=num_prefill)) == dense
    assert rig.records["one"].usage.prompt_tokens == 120
    assert rig.records["one"].usage.completion_tokens == 50


@pytest.mark.parametrize("policy", ["pqcache", "clusterkv"])
def test_the_hot_caches_size_changes_traffic_and_no_token(policy: str) -> None:
    one = request("one", policy, 0.25, max_tokens=60)
    sizes = [HotCacheSize(), HotCacheSize(share=1.0), HotCacheSize(tokens=40), LEAST]
    rigs = [Rig(hot_cache=size, tokens_per_slab=256) for size in sizes]
    tokens = [rig.tokens(one) for rig in rigs]
    assert tokens == [tokens[0]] * 4
    usages = [rig.records["one"].usage for rig in rigs]
    assert (usages[0].hit_rate, usages[0].bytes_moved) == (1.0, 0)
    moved = [usage.bytes_moved for usage in usages]
    assert moved == sorted(moved)
    assert moved[1] < moved[3]
    for rig, usage in zip(rigs, usages, strict=True):
        num_sink, num_recent = 4, 13 if policy == "pqcache" else 0
        num_rows = (30 - num_sink - num_recent) * NUM_KV_HEADS * 3 * 59
        assert usage.bytes_moved == pytest.approx((1 - usage.hit_rate) * num_rows * 2 * 16 * 4)
        stats = rig.engine.stats()
        assert stats.fetched_bytes_total == usage.bytes_moved
        assert stats.selected_rows_total == num_rows
        assert usage.attended_tokens == 30


@pytest.mark.parametrize(("policy", "budget"), [("pqcache", 63), ("pqcache", 64), ("clusterkv", 88)])
def test_the_least_slots_suffice_at_the_edge_of_a_block(policy: str, budget: int) -> None:
    # Sinks, window, new token and selection fill one or two blocks of 64, or need one slot more.
    one = request("one", policy, budget, prompt=220, max_tokens=45)
    least, roomy = Rig(hot_cache=LEAST), Rig()
    assert least.tokens(one) == roomy.tokens(one)
    assert least.records["one"].usage.hit_rate < 1


@pytest.mark.parametrize("full_layers", [1, 3, 9])
@pytest.mark.parametrize("policy", SELECTING)
def test_full_layers_are_dense_and_the_others_select(policy: str, full_layers: int, dense: list[int]) -> None:
    rig = Rig(full_layers=full_layers, hot_cache=LEAST)
    whole, part = rig.run(
        request("whole", policy, 1.0, max_tokens=50), request("part", policy, 30, max_tokens=50)
    )
    assert whole.tokens == dense
    num_dense = min(full_layers, 3)
    if num_dense == 3:
        assert part.tokens == dense
    expected = (num_dense * (120 + 24) + (3 - num_dense) * 30) / 3
    assert part.usage.attended_tokens == pytest.approx(expected)
    rig.check_empty()


@pytest.mark.parametrize("full_layers", [0, 1])
def test_measured_mass_and_recall_are_whole_for_a_whole_budget(full_layers: int) -> None:
    rig = Rig(full_layers=full_layers, tokens_per_slab=256)
    for policy in SELECTING:
        usage = rig.run(request(policy, policy, 1.0, measure=True))[0].usage
        assert usage.attention_mass == pytest.approx(1.0, abs=1e-5)
        assert (usage.recall_rate, usage.best_recall) == (1.0, 1.0)


def test_the_oracles_recall_is_whole_and_its_mass_the_largest() -> None:
    rig = Rig(tokens_per_slab=256, hot_cache=LEAST)
    usage = {p: rig.run(request(p, p, 30, measure=True, max_tokens=30))[0].usage for p in SELECTING}
    assert usage["oracle"].recall_rate == 1.0
    assert 0.3 < usage["oracle"].attention_mass < 1.0
    for policy in ("pqcache", "clusterkv"):
        assert 0.0 < usage[policy].recall_rate < 1.0
        assert 0.0 < usage[policy].attention_mass < 1.0
        # Of the same tokens for both, wherever their windows end; some of the best are sinks and recent ones.
        assert usage[policy].recall_rate < usage[policy].best_recall < usage["oracle"].best_recall <= 1.0
    assert usage["pqcache"].attention_mass < usage["oracle"].attention_mass
    # Where all weigh the same, the best are the later ones too.
    even = make_model()
    with torch.no_grad():
        for name, parameter in even.decoder.named_parameters():
            if "qkv" in name:
                parameter[: parameter.shape[0] * 3 // 5].zero_()
    alike = Rig(even, tokens_per_slab=256).run(request("even", "oracle", 30, measure=True))[0].usage
    assert alike.recall_rate == 1.0
    assert alike.attention_mass == pytest.approx(alike.attended_tokens / 128, rel=0.1)
    unmeasured = rig.run(request("plain", "oracle", 30))[0].usage
    assert unmeasured.attention_mass is None
    assert unmeasured.recall_rate is None


def test_measuring_changes_neither_tokens_nor_traffic() -> None:
    plain, measured = (
        Rig(hot_cache=LEAST).run(request("one", "pqcache", 30, max_tokens=40, measure=measure))[0]
        for measure in (False, True)
    )
    assert measured.tokens == plain.tokens
    assert measured.usage.bytes_moved == plain.usage.bytes_moved
    assert measured.usage.hit_rate == plain.usage.hit_rate


@pytest.mark.parametrize("full_layers", [0, 1])
def test_an_early_query_is_the_layers_own_of_the_layer_before(
    full_layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Guessing(Oracle):
        """Notes what it is given, and selects by it."""

        def score(self, index: None, candidates: Candidates) -> Tensor:
            seen.append((candidates.layer, candidates.queries.early().clone()))
            return super().score(index, candidates)

    seen: list[tuple[int, Tensor]] = []
    inputs: list[tuple[int, Tensor, Tensor]] = []
    rig = Rig(policies={**small_policies(), "oracle": Guessing(num_sink=4)}, full_layers=full_layers)
    decoder = rig.model.decoder
    project = decoder.project_qkv

    def noted(
        layer: int, hidden: Tensor, positions: Tensor, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if hidden.shape[0] == 1:
            inputs.append((layer, hidden.clone(), positions.clone()))
        return project(layer, hidden, positions, rows)

    monkeypatch.setattr(decoder, "project_qkv", noted)
    rig.run(request("one", "oracle", 30, max_tokens=4))
    # Of the layers that the policy serves.
    assert [layer for layer, _ in seen] == 3 * list(range(3 - full_layers))
    # A layer's own input comes first; what the guess was made of is projected when it is asked for.
    of_layer = {(layer, int(at)): hidden for layer, hidden, at in reversed(inputs)}
    for count, (index, early) in enumerate(seen):
        layer = full_layers + index
        position = 120 + count // (3 - full_layers)
        hidden = of_layer[max(0, layer - 1), position]
        with torch.inference_mode():
            expected, _, _ = project(layer, hidden, torch.tensor([position]))
        torch.testing.assert_close(early, expected)
