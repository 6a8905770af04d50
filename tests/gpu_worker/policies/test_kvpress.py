"""What our policies and NVIDIA's kvpress keep of the same layers of carrel-nano: two codes that have nothing in common.

Each docstring says where the two differ and why; what the reason implies is asserted, not only how much is common.
kvpress is not among the project's extras, because it asks for an older transformers (0.5.5: below 5.3). Give it an
environment of its own, with a build of torch for the CPU:

    pip install torch   # from PyTorch's index of CPU builds, or with CUDA
    pip install -e '.[gpu-worker]' kvpress==0.5.5 pytest pytest-asyncio pytest-timeout
    python -m pytest tests/gpu_worker/policies/test_kvpress.py
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gpu_worker.policies.adakv.policy import AdaKV
from gpu_worker.policies.base import Plan
from gpu_worker.policies.cam.policy import CaM, uniform
from gpu_worker.policies.h2o.policy import H2O
from gpu_worker.policies.observed import observed_weight
from gpu_worker.policies.pyramidkv.policy import PyramidKV
from gpu_worker.policies.retain import LayerRows, RetainPolicy, StepSlots
from gpu_worker.policies.snapkv.policy import SnapKV
from gpu_worker.policies.streaming_llm.policy import StreamingLLM

kvpress = pytest.importorskip(
    "kvpress",
    reason="kvpress is not installed; this module's docstring says how, beside an older transformers",
)
transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).parents[3]
NANO = ROOT / "models" / "carrel-nano"
BOOK = ROOT / "examples" / "documents" / "voyage-of-the-beagle.txt"
# A power of two: kvpress is told what to drop as a ratio, which then has no remainder.
NUM_TOKENS = 1024
NUM_LAYERS, NUM_KV_HEADS = 8, 2

pytestmark = pytest.mark.skipif(
    not (NANO / "model.safetensors").exists(), reason="carrel-nano's weights are not there"
)


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of transformers' model after the prompt.

    module: its attention. hidden: [1, n, D], what the module got. keys, values: [1, H_kv, n, d], from the cache.
    queries: [H_q, n, d], rotated. weights: [1, H_q, n, n], the softmax weights that the module itself used. embeddings:
    cosines and sines of the positions.
    """

    module: Any
    hidden: Tensor
    keys: Tensor
    values: Tensor
    queries: Tensor
    weights: Tensor
    embeddings: tuple[Tensor, Tensor]

    def rows(self, policy: RetainPolicy, plan: Plan) -> LayerRows:
        queries = self.queries[:, NUM_TOKENS - policy.num_queries(plan) :]
        rows = torch.cat([self.keys, self.values], dim=-1)[0]
        return LayerRows.of_prompt(self.module.layer_idx, NUM_LAYERS, rows, queries, self.module.scaling)


@pytest.fixture(scope="module")
def layers() -> list[Layer]:
    from tokenizers import Tokenizer
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    model = transformers.AutoModelForCausalLM.from_pretrained(
        NANO, dtype=torch.float32, attn_implementation="eager"
    )
    model.eval().requires_grad_(False)
    token_ids = Tokenizer.from_file(str(NANO / "tokenizer.json")).encode(BOOK.read_text(encoding="utf-8")).ids
    found = []

    def record(module: Any, _args: tuple, kwargs: dict, output: tuple) -> None:
        cache = kwargs["past_key_values"].layers[module.layer_idx]
        hidden, embeddings = kwargs["hidden_states"], kwargs["position_embeddings"]
        queries = module.q_proj(hidden).view(1, NUM_TOKENS, -1, module.head_dim).transpose(1, 2)
        queries, _ = apply_rotary_pos_emb(queries, cache.keys, *embeddings)
        found.append(Layer(module, hidden, cache.keys, cache.values, queries[0], output[1], embeddings))

    for decoder_layer in model.model.layers:
        decoder_layer.self_attn.register_forward_hook(record, with_kwargs=True)
    model(torch.tensor([token_ids[:NUM_TOKENS]]), use_cache=True)
    assert [layer.module.layer_idx for layer in found] == list(range(NUM_LAYERS))
    assert found[0].keys.shape[1] == NUM_KV_HEADS
    # AdaKVPress refuses the name "eager"; nothing is attended any more.
    model.set_attn_implementation("sdpa")
    return found


def ratio(budget: int) -> float:
    """What kvpress is told so that it keeps `budget` tokens of each head."""
    return 1 - budget / NUM_TOKENS


def mask(positions: Tensor) -> Tensor:
    """bool [H_kv, n] from positions [H_kv, S] that -1 pads."""
    is_kept = torch.zeros(len(positions), NUM_TOKENS + 1, dtype=torch.bool)
    return is_kept.scatter_(1, positions % (NUM_TOKENS + 1), True)[:, :NUM_TOKENS]


def ours(policy: RetainPolicy, layer: Layer, budget: int, layer_budget: int | None = None) -> Tensor:
    """What our policy keeps: bool [H_kv, n]."""
    plan = policy.plan(NUM_TOKENS, budget)
    if layer_budget is None:
        layer_budget = policy.layer_budget(plan, layer.module.layer_idx, NUM_LAYERS)
    return mask(policy.compress(layer.rows(policy, plan), plan, layer_budget).positions)


def theirs(press: Any, layer: Layer, weights: Tensor | None = None) -> Tensor:
    """What a press keeps: bool [H_kv, n]. The values that it gets are positions, which no score reads."""
    positions = torch.arange(NUM_TOKENS, dtype=torch.float32)[:, None].expand_as(layer.values)
    _, kept = press.compress(
        layer.module, layer.hidden, layer.keys, positions, weights, {"position_embeddings": layer.embeddings}
    )
    return mask(kept[0, ..., 0].long())


def theirs_masked(press: Any, layer: Layer) -> Tensor:
    """What AdaKVPress keeps, which leaves all rows and names those that are not to be attended."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer.module, "masked_key_indices", None, raising=False)
        theirs(press, layer)
        _, heads, positions = layer.module.masked_key_indices
    is_kept = torch.ones(NUM_KV_HEADS, NUM_TOKENS, dtype=torch.bool)
    is_kept[heads, positions] = False
    return is_kept


def our_scores(policy: SnapKV | H2O, layer: Layer, budget: int) -> Tensor:
    plan = policy.plan(NUM_TOKENS, budget)
    return policy.score(layer.rows(policy, plan), plan).first


def assert_same(first: Tensor, second: Tensor, scores: Tensor) -> None:
    """Equal sets; one token of a head may be another whose score differs by float32's rounding alone."""
    assert torch.equal(first.sum(dim=1), second.sum(dim=1))
    for head in range(len(first)):
        at_the_edge = scores[head, first[head] ^ second[head]]
        assert len(at_the_edge) <= 2
        torch.testing.assert_close(at_the_edge, at_the_edge.flip(0), rtol=1e-5, atol=0)


def assert_nested(first: Tensor, second: Tensor, scores: Tensor) -> None:
    """Of each head's two sets the smaller is a part of the larger, but for scores at its edge."""
    for head in range(len(first)):
        few, many = sorted((first[head], second[head]), key=lambda kept: int(kept.sum()))
        missing = scores[head, few & ~many]
        assert len(missing) <= 1
        assert (missing <= scores[head, few][scores[head, few] > 0].min() * (1 + 1e-5)).all()


@pytest.mark.parametrize("num_sink", [0, 4, 16])
@pytest.mark.parametrize("budget", [64, 256, 1000])
def test_streaming_llm_is_the_same(layers: list[Layer], budget: int, num_sink: int) -> None:
    press = kvpress.StreamingLLMPress(ratio(budget), n_sink=num_sink)
    for layer in layers:
        assert torch.equal(ours(StreamingLLM(num_sink), layer, budget), theirs(press, layer))


@pytest.mark.parametrize(("window", "kernel"), [(64, 5), (32, 7), (8, 7), (32, 1)])
@pytest.mark.parametrize("budget", [128, 256, 768])
def test_snapkv_with_averages_is_the_same(layers: list[Layer], budget: int, window: int, kernel: int) -> None:
    """kvpress's defaults, ours, and others. Its average of the group comes after the pooling, ours before: with
    averages of both that is the same."""
    policy = SnapKV(window, kernel, "avg")
    press = kvpress.SnapKVPress(ratio(budget), window_size=window, kernel_size=kernel)
    for layer in layers:
        assert_same(ours(policy, layer, budget), theirs(press, layer), our_scores(policy, layer, budget))


@pytest.mark.parametrize("budget", [128, 256, 768])
def test_snapkv_with_maxima_differs_by_its_pooling_alone(layers: list[Layer], budget: int) -> None:
    """We pool by maxima, as the paper's LongBench runs do; kvpress knows averages only.

    An average of 7 votes is at least a seventh of their maximum: what has a maximum of more than 7 times the least
    average that kvpress keeps is kept by both. Without neighbours there is no difference.
    """
    alone = kvpress.SnapKVPress(ratio(budget), window_size=32, kernel_size=1)
    press = kvpress.SnapKVPress(ratio(budget), window_size=32, kernel_size=7)
    common, both = 0, 0
    for layer in layers:
        single = SnapKV(kernel=1)
        assert_same(ours(single, layer, budget), theirs(alone, layer), our_scores(single, layer, budget))
        got, expected = ours(SnapKV(), layer, budget), theirs(press, layer)
        averages = our_scores(SnapKV(pooling="avg"), layer, budget)[:, :-32]
        least = averages.masked_fill(~expected[:, :-32], float("inf")).amin(dim=1, keepdim=True)
        is_sure = our_scores(SnapKV(), layer, budget)[:, :-32] > 7 * least * (1 + 1e-5)
        assert (got & expected)[:, :-32][is_sure].all()
        both += int(is_sure.sum())
        common += int((got & expected)[:, :-32].sum())
    assert both > 0
    share = common / (NUM_LAYERS * NUM_KV_HEADS * (budget - 32))
    assert 0.8 < share < 1


def test_snapkv_of_a_small_budget_keeps_more_than_its_window(layers: list[Layer]) -> None:
    """Our window is at most half of the budget. kvpress's is not, and of 64 tokens that it may keep it keeps the
    last 64."""
    press = kvpress.SnapKVPress(ratio(64), window_size=64)
    for layer in layers:
        assert theirs(press, layer)[:, -64:].all()
        policy = SnapKV(window=64, kernel=5, pooling="avg")
        halved = SnapKV(window=32, kernel=5, pooling="avg")
        got = ours(policy, layer, 64)
        assert torch.equal(got, ours(halved, layer, 64))
        assert got[:, -32:].all()
        smaller = kvpress.SnapKVPress(ratio(64), window_size=32)
        assert_same(got, theirs(smaller, layer), our_scores(halved, layer, 64))


@pytest.mark.parametrize("window", [8, 32])
@pytest.mark.parametrize("budget", [128, 256, 768])
def test_pyramidkv_differs_by_its_schedule_alone(layers: list[Layer], budget: int, window: int) -> None:
    """kvpress has the whole budget fall from layer to layer, the window in it; we, like the authors' code, only what is
    selected beyond the window. Where its last layer would keep less than a window, kvpress keeps the same in all.
    Its layers are rounded one by one, ours to the exact sum.

    The votes are the same, so that of a layer's two sets the smaller is a part of the larger, and with the same
    budget for the layer they are one.
    """
    policy = PyramidKV(window, 7, "avg")
    press = kvpress.PyramidKVPress(ratio(budget), window_size=window, kernel_size=7, beta=20)
    budgets = []
    for layer in layers:
        got, expected = ours(policy, layer, budget), theirs(press, layer)
        scores = our_scores(policy, layer, budget)
        scores[:, -window:] = float("inf")
        counts = int(got[0].sum()), int(expected[0].sum())
        assert_nested(got, expected, scores)
        assert_same(ours(policy, layer, budget, counts[1]), expected, scores)
        budgets.append(counts)
    mine, other = torch.tensor(budgets, dtype=torch.float64).T
    assert mine.sum() == NUM_LAYERS * budget
    place = torch.linspace(-1, 1, NUM_LAYERS, dtype=torch.float64)
    selected, candidates = budget - window, NUM_TOKENS - window
    first = min(selected * (2 - 1 / 20), candidates)
    torch.testing.assert_close(mine, window + selected - (first - selected) * place, atol=1, rtol=0)
    first = min(budget * (2 - 1 / 20), candidates)
    if 2 * budget - first < window:
        assert (other == budget).all()
        return
    torch.testing.assert_close(other, budget - (first - budget) * place, atol=0.5, rtol=0)
    assert abs(other.sum() - NUM_LAYERS * budget) <= NUM_LAYERS / 2
    if first < candidates:
        # Its pyramid is steeper by the window, which we do not taper.
        torch.testing.assert_close(mine - other, window * (1 - 1 / 20) * place, atol=1.5, rtol=0)


@pytest.mark.parametrize("inner", [SnapKV(pooling="avg"), SnapKV(8, 5, "avg")])
@pytest.mark.parametrize("budget", [128, 256, 768])
def test_adakv_without_a_safeguard_is_the_same(layers: list[Layer], budget: int, inner: SnapKV) -> None:
    press = kvpress.AdaKVPress(
        kvpress.SnapKVPress(ratio(budget), window_size=inner.window, kernel_size=inner.kernel), 0.0
    )
    num_unequal = 0
    for layer in layers:
        got, expected = ours(AdaKV(inner, alpha=0), layer, budget), theirs_masked(press, layer)
        assert_same(got, expected, our_scores(inner, layer, budget))
        num_unequal += int(got[0].sum() != got[1].sum())
    assert num_unequal > NUM_LAYERS / 2


@pytest.mark.parametrize("alpha", [0.2, 0.5, 1.0])
@pytest.mark.parametrize("budget", [128, 256, 768])
def test_adakv_differs_by_its_safeguard_alone(layers: list[Layer], budget: int, alpha: float) -> None:
    """Of what a head wins in the common ranking we keep 1 - alpha, and alpha of a uniform share is added, as the
    authors' code does. kvpress protects each head's best alpha of a uniform share, window included, and lets the rest
    of the places go by the common ranking: it changes nothing as long as every head wins that much.

    Both keep a head's best, so that of its two sets the smaller is a part of the larger; how many, follows for both
    from what the head wins, and with alpha 1 all is the same.
    """
    inner = SnapKV(8, 7, "avg")
    press = kvpress.AdaKVPress(kvpress.SnapKVPress(ratio(budget), window_size=8, kernel_size=7), alpha)
    for layer in layers:
        won = ours(AdaKV(inner, alpha=0), layer, budget).sum(dim=1).double()
        got, expected = ours(AdaKV(inner, alpha), layer, budget), theirs_masked(press, layer)
        scores = our_scores(inner, layer, budget)
        scores[:, -8:] = float("inf")
        assert_nested(got, expected, scores)
        assert got.sum() == expected.sum() == NUM_KV_HEADS * budget
        torch.testing.assert_close(
            got.sum(dim=1).double(), (1 - alpha) * won + alpha * budget, atol=0.75, rtol=0
        )
        # Of two heads one has what the other leaves.
        safe = int(budget * alpha)
        assert (expected.sum(dim=1) - won.clamp(safe, NUM_KV_HEADS * budget - safe)).abs().max() <= 1
        if alpha == 1:
            assert_same(got, expected, scores)


@pytest.mark.parametrize("budget", [128, 256, 768])
def test_h2o_differs_from_observed_attention_by_a_mean_and_a_window(layers: list[Layer], budget: int) -> None:
    """kvpress divides the weight that a token has gathered by the number of queries that saw it, and it protects no
    window; H2O adds up, as published, and gives half of the budget to the last tokens.

    Its scores are ours, divided. Early tokens are seen by more queries: of what only one of the two keeps between
    sinks and window, all of ours comes before any of kvpress's.
    """
    press = kvpress.ObservedAttentionPress(ratio(budget))
    num_queries = torch.arange(NUM_TOKENS, 0, -1)
    for layer in layers:
        means = our_scores(H2O(), layer, budget) / num_queries
        their_scores = press.score(layer.module, layer.hidden, layer.keys, layer.values, layer.weights, {})[0]
        torch.testing.assert_close(means, their_scores, atol=0, rtol=1e-4)
        expected = theirs(press, layer, layer.weights)
        assert_same(mask(means.topk(budget).indices), expected, means)
        for policy, num_recent in [(H2O(recent_ratio=0), 0), (H2O(), budget // 2)]:
            got = ours(policy, layer, budget)
            end = NUM_TOKENS - num_recent
            assert got[:, end:].all()
            for head in range(NUM_KV_HEADS):
                only_ours = (got & ~expected)[head, :end].nonzero()
                only_theirs = (expected & ~got)[head, :end].nonzero()
                assert len(only_theirs) > 0 or num_recent > 0
                if len(only_ours) and len(only_theirs):
                    assert only_ours.max() < only_theirs.min()


def cam_press(policy: CaM, budget: int) -> Any:
    return kvpress.CAMPress(
        kvpress.StreamingLLMPress(n_sink=policy.num_sink),
        compression_interval=1,
        target_size=budget,
        merge_budget=policy.merge_size,
    )


def their_step(
    press: Any, layer: Layer, positions: Tensor, values: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """What CAMPress keeps, and its values, after a step that gave these weights [H_kv, S]; positions: [S]. The keys
    that it gets are positions, which streaming does not read."""
    index = layer.module.layer_idx
    press.layer_step_counts = defaultdict(int, {index: 1})
    press._running_attn_sum = {index: weights[None]}
    keys = positions[:, None].float().expand_as(values)[None]
    kept, values = press.compress(layer.module, layer.hidden, keys, values[None].clone(), weights[None], {})
    assert (kept == kept[:, :1, :, :1]).all()
    return kept[0, 0, :, 0].long(), values[0]


def our_step(
    policy: CaM, plan: Plan, positions: Tensor, values: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """The same of ours, which evicts before the next token."""
    num_tokens = int(positions[-1]) + 1
    slots = StepSlots(
        positions.expand(1, 1, NUM_KV_HEADS, -1),
        weights[None, None],
        torch.tensor([plan.num_sink]),
        torch.tensor([policy.window_begin(plan, num_tokens)]),
        torch.tensor([num_tokens]),
    )
    given_up = policy.evict(slots)
    evicted, gift = given_up.slots, given_up.gift
    assert gift is not None
    assert (evicted == evicted[0, 0, 0]).all()
    slot, values = int(evicted[0, 0, 0]), values.clone()
    for head, heirs in enumerate(gift.slots[0, 0]):
        values[head, heirs[heirs >= 0]] += gift.share[0, 0, head] * values[head, slot]
    stays = torch.arange(len(positions)) != slot
    return positions[stays], values[:, stays]


def latest_weights(layer: Layer, positions: Tensor) -> Tensor:
    """Softmax weights of the last of these tokens over all of them, the mean over the group: [H_kv, S]."""
    keys = layer.keys[0][:, positions]
    queries = layer.queries[:, positions[-1]].view(NUM_KV_HEADS, -1, keys.shape[-1])
    return (queries @ keys.transpose(1, 2) * layer.module.scaling).softmax(dim=-1).mean(dim=1)


def always_merge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides' coins say yes, whatever the chances."""
    monkeypatch.setattr(torch, "bernoulli", torch.ones_like)
    monkeypatch.setattr(
        "gpu_worker.policies.cam.policy.uniform",
        lambda _seed, positions, *_keys: torch.zeros(positions.shape),
    )


@pytest.mark.parametrize("merge_size", [60, 8])
def test_cam_decodes_alike(layers: list[Layer], monkeypatch: pytest.MonkeyPatch, merge_size: int) -> None:
    """CAMPress over streaming, once a step, given our weights and our coins, or coins that always merge.

    kvpress sums the weights of all decode steps, where we, like the authors' code, take the latest query's; its mean is
    over the heirs of the token, ours over the window, so that the chances are the same where all of the window
    inherits, here with a merge size of 60.
    """
    budget, num_steps = 64, 100
    policy = CaM(merge_size=merge_size)
    plan = policy.plan(budget, budget)
    assert plan.num_recent == 60
    chances = []

    def toss(chance: Tensor) -> Tensor:
        assert chance.shape == (1, NUM_KV_HEADS, 1)
        chances.append(chance)
        if merge_size < plan.num_recent:
            return torch.ones_like(chance)
        coins = uniform(policy.seed, leaving, torch.arange(NUM_KV_HEADS), 0)
        return (coins[None, :, None] < chance).float()

    if merge_size < plan.num_recent:
        always_merge(monkeypatch)
    monkeypatch.setattr(torch, "bernoulli", toss)
    for layer in layers:
        press = cam_press(policy, budget)
        mine = other = torch.arange(budget), layer.values[0, :, :budget]
        for token in range(budget, budget + num_steps):
            leaving = torch.tensor(token - plan.num_recent)
            value = layer.values[0, :, token : token + 1]
            mine, other = (
                (torch.cat([positions, torch.tensor([token])]), torch.cat([values, value], dim=1))
                for positions, values in (mine, other)
            )
            weights = latest_weights(layer, mine[0])
            mine, other = our_step(policy, plan, *mine, weights), their_step(press, layer, *other, weights)
            assert torch.equal(mine[0], other[0])
            assert mine[0].tolist() == [0, 1, 2, 3, *range(token - plan.num_recent + 1, token + 1)]
            torch.testing.assert_close(mine[1], other[1], atol=1e-4, rtol=1e-4)
    certain = float((torch.cat(chances) == 1).float().mean())
    assert 0 < certain < 1


def test_cam_compresses_a_prompt_otherwise(layers: list[Layer], monkeypatch: pytest.MonkeyPatch) -> None:
    """kvpress leaves the prompt alone until the first step, and then merges as many of the evicted tokens as steps were
    decoded, that is the last one. Ours passes the values on one after another, as if the prompt had been decoded.

    What stays is the same, keys too, and where every coin says yes, in both the first tokens of the window inherit, and
    no others.
    """
    budget, merge_size = 256, 32
    always_merge(monkeypatch)
    policy = CaM(merge_size=merge_size)
    plan = policy.plan(NUM_TOKENS, budget)
    for layer in layers:
        rows = layer.rows(policy, plan)
        retained = policy.compress(rows, plan, budget)
        weights = observed_weight(rows)
        positions, values = their_step(
            cam_press(policy, budget), layer, torch.arange(NUM_TOKENS), layer.values[0], weights
        )
        assert (retained.positions == positions).all()
        assert torch.equal(retained.keys, layer.keys[0][:, positions])
        kept = layer.values[0][:, positions]
        heirs = slice(plan.num_sink, plan.num_sink + merge_size)
        last = layer.values[0][:, NUM_TOKENS - plan.num_recent - 1, None]
        torch.testing.assert_close((values - kept)[:, heirs], (last / merge_size).expand(-1, merge_size, -1))
        for got in (retained.values, values):
            is_heir = (got != kept).any(dim=-1).any(dim=0)
            assert not is_heir[: heirs.start].any()
            assert is_heir[heirs].all()
            assert not is_heir[heirs.stop :].any()
        assert not torch.allclose(retained.values, values)
