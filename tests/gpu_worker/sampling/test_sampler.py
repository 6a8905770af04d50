import collections
import math

import numpy as np
import pytest
import torch
from device_reads import DeviceReads

from gpu_worker.records import SamplingParams
from gpu_worker.sampling import Sampler, SamplerState
from gpu_worker.sampling.sampler import draw, uniform

VOCAB_SIZE = 50


class Only:
    """A constraint that allows the same few tokens at each step."""

    is_ready, is_complete = True, False

    def __init__(self, *token_ids):
        self.token_ids = list(token_ids)

    def take(self, token_id):
        assert token_id in self.token_ids

    def allowed(self, vocab_size, end_token_ids):
        bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
        bits[self.token_ids] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)


def state(prompt=(1, 2, 3), eos=(0,), request_id="r", default_seed=None, constraint=None, **params):
    return SamplerState(
        SamplingParams(**params), prompt, VOCAB_SIZE, eos, request_id, default_seed, constraint
    )


def logits_of(*rows):
    return torch.stack([torch.tensor(row, dtype=torch.float32) for row in rows])


def random_logits(num_rows, seed=0):
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 2


def run(states, logits_of_step, num_steps):
    """Token ids of each request over some steps."""
    sampler, tokens = Sampler(), [[] for _ in states]
    for step in range(num_steps):
        for i, event in enumerate(sampler.sample(logits_of_step(step), states)):
            states[i].append(event.token_id)
            tokens[i].append(event.token_id)
    return tokens


def test_greedy_takes_the_greatest_and_the_smaller_id_on_a_tie():
    logits = torch.zeros(2, VOCAB_SIZE)
    logits[0, [7, 30]] = 5.0
    events = Sampler().sample(logits, [state(temperature=0.0), state(temperature=0.0)])
    assert [event.token_id for event in events] == [7, 0]
    assert events[0].logprob is None
    assert events[0].top == ()


def test_logits_stay_as_they_were():
    logits = random_logits(3)
    before = logits.clone()
    states = [
        state(repetition_penalty=1.5, presence_penalty=1.0, seed=1),
        state(temperature=0.0, logit_bias=((4, 100.0),), min_tokens=3),
        state(top_k=3, top_p=0.5, min_p=0.1),
    ]
    Sampler().sample(logits, states)
    assert torch.equal(logits, before)


def test_the_host_waits_for_no_token_before_it_takes_them():
    states = [
        state(temperature=0.0, logprobs=3),
        state(repetition_penalty=1.5, presence_penalty=1.0, seed=1),
        state(temperature=0.0, logit_bias=((4, 100.0),), min_tokens=3),
        state(top_k=3, logprobs=0),
        state(top_k=4, top_p=0.5, min_p=0.1),
        state(temperature=0.0, constraint=Only(7, 8), logprobs=1),
        state(constraint=Only(7, 9), presence_penalty=1.0),
    ]
    for one in states:
        one.append(7)
    with DeviceReads() as reads:
        choice = Sampler().begin(random_logits(len(states)), states)
        assert not reads.found
        assert len(choice.take()) == len(states)
        assert reads.found


@pytest.mark.parametrize("temperature", [0.0, 5.0])
def test_a_constraint_holds_its_own_row(temperature):
    held = {"constraint": Only(3, 31, 32, 49), "logit_bias": ((7, 100.0),), "presence_penalty": 1.0}
    states = [
        state(temperature=temperature, seed=1),
        state(temperature=temperature, seed=2, **held),
        state(temperature=temperature, seed=3, constraint=Only(40)),
    ]
    tokens = run(states, lambda step: random_logits(3, step), 40)
    (alone,) = run([state(temperature=temperature, seed=1)], lambda step: random_logits(3, step)[:1], 40)
    assert tokens[0] == alone
    assert set(tokens[1]) == {3, 31, 32, 49}
    assert set(tokens[2]) == {40}


def test_logprobs_under_a_constraint_are_those_of_all_tokens():
    logits = random_logits(1)
    free, held = state(temperature=0.0, logprobs=3), state(temperature=0.0, logprobs=3, constraint=Only(6))
    (whole,) = Sampler().sample(logits.clone(), [free])
    (event,) = Sampler().sample(logits.clone(), [held])
    assert event.token_id == 6
    assert event.logprob == pytest.approx(torch.log_softmax(logits[0], dim=-1)[6].item())
    assert event.top == whole.top


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_invalid_logits_have_no_token_where_a_constraint_rules_them_out(value):
    logits = random_logits(2)
    logits[1, 3] = value
    states = [state(constraint=Only(6)), state(constraint=Only(6))]
    valid, invalid = Sampler().sample(logits, states)
    assert valid.token_id == 6
    assert invalid is None


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature):
    logits = random_logits(1) / 2
    request = state(temperature=temperature, seed=11)
    num_draws = 4000
    (tokens,) = run([request], lambda _: logits, num_draws)
    expected = torch.softmax(logits[0] / temperature, dim=-1) * num_draws
    observed = torch.bincount(torch.tensor(tokens), minlength=VOCAB_SIZE)
    chi_square = ((observed - expected) ** 2 / expected).sum().item()
    # 49 degrees of freedom: 1 in 10^5 lies above 101
    assert chi_square < 101


def test_draws_stay_inside_the_filters():
    logits = random_logits(1, seed=5)
    ranked = logits[0].argsort(descending=True).tolist()
    (by_top_k,) = run([state(top_k=4, seed=1, temperature=2.0)], lambda _: logits, 300)
    assert set(by_top_k) == set(ranked[:4])
    (by_all,) = run([state(top_k=10, top_p=0.6, min_p=0.05, seed=1)], lambda _: logits, 300)
    probabilities = torch.softmax(logits[0][ranked[:10]], dim=-1)
    num_kept = int((probabilities.cumsum(0) - probabilities < 0.6).sum())
    assert set(by_all) <= set(ranked[:num_kept])
    assert len(set(by_all)) > 1


def test_a_seed_fixes_the_tokens_and_another_seed_changes_them():
    def tokens(seed):
        return run([state(seed=seed)], lambda step: random_logits(1, step), 40)

    assert tokens(5) == tokens(5)
    assert tokens(5) != tokens(6)


def test_without_a_seed_requests_differ_unless_the_worker_has_one():
    def tokens(request_id, default_seed):
        request = state(request_id=request_id, default_seed=default_seed)
        return run([request], lambda step: random_logits(1, step), 40)

    assert tokens("a", None) != tokens("a", None)
    assert tokens("a", 3) == tokens("a", 3)
    assert tokens("a", 3) != tokens("b", 3)


def test_tokens_do_not_depend_on_batch_mates():
    kinds = [
        {"seed": 1},
        {"temperature": 0.0},
        {"seed": 2, "top_k": 5, "temperature": 1.7},
        {"seed": 3, "top_p": 0.8, "frequency_penalty": 0.5},
        {"seed": 4, "min_p": 0.1, "repetition_penalty": 1.3, "logprobs": 2},
        {"temperature": 0.0, "presence_penalty": 1.0, "min_tokens": 5},
    ]
    steps = [random_logits(len(kinds), step) for step in range(30)]
    together = run([state(**kind) for kind in kinds], lambda step: steps[step], 30)
    for i, kind in enumerate(kinds):
        (alone,) = run([state(**kind)], lambda step, i=i: steps[step][i : i + 1], 30)
        assert alone == together[i], kind


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits():
    row = [0.0] * VOCAB_SIZE
    row[1], row[4], row[2], row[5] = 3.0, 2.0, -1.0, -1.5
    request = state(prompt=(1, 2), temperature=0.0, repetition_penalty=2.0, logprobs=0)
    # 3 / 2 falls below token 4's 2
    assert Sampler().sample(logits_of(row), [request])[0].token_id == 4
    request.append(4)
    # both halved now: 1.5 against 1.0
    assert Sampler().sample(logits_of(row), [request])[0].token_id == 1
    negative = [-9.0] * VOCAB_SIZE
    negative[2], negative[5] = -1.0, -1.5
    assert Sampler().sample(logits_of(negative), [request])[0].token_id == 5


def test_a_tiny_repetition_penalty_overflows_to_no_token_outside_the_vocabulary():
    # A quotient beyond float32 must stay a number: NaN would let the draw run off the end of a vocabulary of 5.
    params = SamplingParams(repetition_penalty=1e-45, seed=1)
    sampled = Sampler().sample(
        torch.tensor([[1.0, 2.0, -1.0, 0.5, 0.0]]), [SamplerState(params, (0, 1), 5, (), "r")]
    )
    assert sampled[0].token_id in (0, 1)


def test_presence_and_frequency_count_the_output_only():
    row = [-9.0] * VOCAB_SIZE
    row[1], row[2] = 2.0, 1.1
    presence = state(prompt=(1,), temperature=0.0, presence_penalty=1.0)
    frequency = state(prompt=(1,), temperature=0.0, frequency_penalty=0.4)
    tokens = run([presence, frequency], lambda _: logits_of(row, row), 6)
    # 2.0, then 1.0 < 1.1, then 1.0 > 0.1 for good
    assert tokens[0] == [1, 2, 1, 1, 1, 1]
    # token 1 gives 2.0 1.6 1.2 0.8 0.4; token 2 gives 1.1 0.7 0.3
    assert tokens[1] == [1, 1, 1, 2, 1, 2]


def test_logit_bias_bans_and_forces():
    logits = random_logits(1)
    best, second = logits[0].argsort(descending=True)[:2].tolist()
    banned = state(temperature=0.0, logit_bias=((best, -100.0),))
    forced = state(seed=0, temperature=1.0, logit_bias=((9, 100.0),))
    assert Sampler().sample(logits, [banned])[0].token_id == second
    assert Sampler().sample(logits, [forced])[0].token_id == 9


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_end_tokens_wait_for_min_tokens(temperature):
    row = [0.0] * VOCAB_SIZE
    row[0], row[8] = 60.0, 59.0
    request = state(
        temperature=temperature, seed=3, min_tokens=3, stop_token_ids=(8,), logit_bias=((0, 100.0),)
    )
    (tokens,) = run([request], lambda _: logits_of(row), 5)
    assert not set(tokens[:3]) & {0, 8}
    assert tokens[3:] == [0, 0]


def test_ignore_eos_leaves_the_model_end_token_free():
    row = [0.0] * VOCAB_SIZE
    row[0] = 9.0
    request = state(temperature=0.0, min_tokens=2, ignore_eos=True)
    assert run([request], lambda _: logits_of(row), 2) == [[0, 0]]


def test_a_fully_masked_vocabulary_still_gives_a_token():
    everything = tuple(range(VOCAB_SIZE))
    states = [state(temperature=t, min_tokens=2, stop_token_ids=everything) for t in (0.0, 0.01, 1.0)]
    events = Sampler().sample(random_logits(3), states)
    assert all(0 <= event.token_id < VOCAB_SIZE for event in events)


def test_logprobs_are_of_the_raw_logits():
    logits = random_logits(3)
    states = [
        state(temperature=0.0, logprobs=3),
        state(seed=1, temperature=0.3, presence_penalty=2.0, logit_bias=((5, 100.0),), logprobs=0),
        state(seed=1),
    ]
    expected = torch.log_softmax(logits, dim=-1)
    plain, biased, without = Sampler().sample(logits, states)
    ranked = expected[0].argsort(descending=True)[:3].tolist()
    assert [token_id for token_id, _ in plain.top] == ranked
    assert [logprob for _, logprob in plain.top] == pytest.approx(expected[0, ranked].tolist())
    assert plain.logprob == plain.top[0][1]
    assert biased.token_id == 5
    assert biased.logprob == pytest.approx(expected[1, 5].item())
    assert biased.top == ()
    assert without.logprob is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_invalid_logits_have_no_token_and_the_others_are_as_alone(bad):
    logits = random_logits(3)
    alone = Sampler().sample(logits[:1].clone(), [state(logprobs=1, temperature=0.0)])
    logits[1, 17] = bad
    logits[2] = -torch.inf
    states = [state(logprobs=1, temperature=temperature) for temperature in (0.0, 0.0, 1.0)]
    assert Sampler().sample(logits, states) == [*alone, None, None]


def test_a_model_that_bans_tokens_itself_is_fine():
    logits = random_logits(1)
    logits[0, 10:] = -torch.inf
    (tokens,) = run([state(seed=1, temperature=2.0, logprobs=2)], lambda _: logits, 100)
    assert max(tokens) < 10


def test_tiny_temperature_is_greedy():
    logits = random_logits(1) * 1e4
    assert run([state(seed=1, temperature=1e-7)], lambda _: logits, 3) == [[logits.argmax().item()] * 3]


def test_draw_inverts_the_distribution_function():
    logits = torch.tensor([[0.25, 0.5, 0.25]]).log().expand(5, 3)
    uniforms = torch.tensor([0.0, 0.24, 0.26, 0.74, 1 - 2**-53], dtype=torch.float64)
    assert draw(logits, uniforms).tolist() == [0, 0, 1, 1, 2]


def test_draw_never_takes_a_removed_token():
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).expand(3, 5)
    uniforms = torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert draw(logits, uniforms).tolist() == [1, 3, 3]


def test_uniform_fills_the_interval_evenly():
    counts = collections.Counter(int(uniform(seed, n) * 10) for seed in range(20) for n in range(500))
    assert set(counts) == set(range(10))
    assert all(abs(count - 1000) < 150 for count in counts.values())
