import dataclasses
import math

import pytest
from fake_engine import INFO

from carrel.process.histogram import Distribution
from gpu_worker.errors import RequestError, VersionMismatch
from gpu_worker.records import Budget, CompleteEvent, EngineStats, FinishReason, Usage
from gpu_worker.service import converters
from gpu_worker.v1 import gpu_worker_pb2 as pb


def message(sampling=None, budget=None, **fields):
    values = {"request_id": "r", "prompt_token_ids": [1, 2], **fields}
    built = pb.GenerateRequest(sampling=pb.SamplingParams(**{"max_tokens": 4, **(sampling or {})}), **values)
    if budget is not None:
        built.budget.CopyFrom(pb.Budget(**budget))
    return built


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("param", "sampling"),
    [(name, {name: value}) for name, values in {
        "max_tokens": (0,),
        "stop_token_ids": ([100], [2**32 - 1], [1] * 65),
        "logit_bias": ({100: 1.0}, {1: 101.0}, {1: NAN}),
        "min_tokens": (5, 2**32 - 1),
    }.items() for value in values],
)  # fmt: skip
def test_a_bad_sampling_field_is_named(param, sampling):
    with pytest.raises(RequestError) as error:
        converters.read_request(message(sampling), INFO)
    assert error.value.param == param


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("prompt", {"prompt_token_ids": []}),
        ("prompt", {"prompt_token_ids": [1, 100]}),
        ("num_prefill_tokens", {"num_prefill_tokens": 3}),
        ("carrel.policy", {"policy": "nonsense"}),
        ("session_id", {"session_id": "x" * 129}),
        ("prefix_salt", {"prefix_salt": b"x" * 65}),
        ("weight", {"weight": -1.0}),
        ("weight", {"weight": float("nan")}),
        ("cache_salt", {"cache_salt": "x" * 257}),
        ("carrel.budget", {"budget": {"share": NAN}}),
        ("carrel.budget", {"budget": {"tokens": 1}}),
        ("request_id", {"request_id": ""}),
        ("request_id", {"request_id": "a" * 129}),
        ("request_id", {"request_id": "a b"}),
        ("request_id", {"request_id": "a\nb"}),
        ("request_id", {"request_id": "a\n"}),
        ("request_id", {"request_id": "é"}),
    ],
)
def test_a_bad_request_field_is_named(param, fields):
    with pytest.raises(RequestError) as error:
        converters.read_request(message(**fields), INFO)
    assert error.value.param == param


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 2.0},
        {"top_p": 1.0},
        {"top_p": 1e-6},
        {"min_p": 0.99},
        {"repetition_penalty": 2.0},
        {"presence_penalty": -2.0},
        {"logprobs": 20},
        {"logprobs": 0},
        {"seed": 2**64 - 1},
        {"top_k": 2**32 - 1},
        {"min_tokens": 4},
        {"max_tokens": 62},
    ],
)
def test_limits_are_inside(sampling):
    read = converters.read_request(message(sampling), INFO).sampling
    ((name, value),) = sampling.items()
    assert getattr(read, name) == pytest.approx(value)


def test_an_unknown_policy_lists_the_valid_ones():
    with pytest.raises(RequestError, match="full, pqcache"):
        converters.read_request(message(policy="x"), INFO)


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens"), [(2, 63), (64, None), (64, 1), (200, None), (2, 2**32 - 1)]
)
def test_too_long_a_request_says_so(num_prompt, max_tokens):
    with pytest.raises(RequestError, match="maximum context length is 64 tokens") as error:
        converters.read_request(message({"max_tokens": max_tokens}, prompt_token_ids=[1] * num_prompt), INFO)
    assert (error.value.param, error.value.code) == ("prompt", "context_length_exceeded")


def test_every_usage_field_arrives():
    numbers = {f.name: i + 1 for i, f in enumerate(dataclasses.fields(Usage)) if f.name != "policy"}
    event = CompleteEvent(FinishReason.STOP, Usage(policy="full", **numbers), stop_token_id=7)
    complete = converters.write_complete(event).complete
    assert {name: getattr(complete.usage, name) for name in numbers} == numbers
    assert (complete.usage.policy, complete.stop_token_id) == ("full", 7)
    assert complete.finish_reason == pb.FINISH_REASON_STOP


def test_every_stat_arrives():
    scalars = [f.name for f in dataclasses.fields(EngineStats) if f.type in ("int", "float")]
    numbers = {name: i for i, name in enumerate(scalars)}
    histograms = [f.name for f in dataclasses.fields(EngineStats) if f.type == "Distribution"]
    told = {name: Distribution((0.5, 1.0), (i, 2, 3), i / 2) for i, name in enumerate(histograms)}
    written = converters.write_stats(
        EngineStats(
            store_reachable=False,
            decode_stall_seconds={"index": Distribution((1.0,), (4, 5), 6.0)},
            fallbacks_total={"recompute": 7},
            **numbers,
            **told,
        )
    )
    assert {name: getattr(written, name) for name in numbers} == numbers
    assert not written.store_reachable
    for i, name in enumerate(histograms):
        assert getattr(written, name) == pb.Histogram(bounds=[0.5, 1.0], counts=[i, 2, 3], sum=i / 2)
    assert dict(written.decode_stall_seconds) == {"index": pb.Histogram(bounds=[1.0], counts=[4, 5], sum=6.0)}
    assert dict(written.fallbacks_total) == {"recompute": 7}
    assert len(numbers) + len(told) + 3 == len(written.DESCRIPTOR.fields)


def test_both_kinds_of_default_budget_are_told():
    assert converters.write_budget(Budget(tokens=9)).tokens == 9
    assert converters.write_budget(Budget(share=0.25)).share == 0.25


def test_a_caller_that_writes_prompts_otherwise_is_refused_for_its_edition():
    older = pb.GenerateRequest(edition=pb.Edition(version="0.0.9", messages="older")).SerializeToString()
    # Two token ids of field 2, of as many bytes as each needs.
    message = pb.GenerateRequest.FromString(older + bytes([0x12, 3, 0x80, 0x01, 0x05]))
    with pytest.raises(VersionMismatch, match=r"0\.0\.9"):
        converters.check_edition(message)
