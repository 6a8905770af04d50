"""The service as its client sees it: a real stub, a real server on a Unix socket, a fake engine."""

import asyncio
import json
import logging
import os
import random
import threading
from concurrent.futures import Future

import grpc
import pytest
from fake_engine import INFO
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from waiting import PATIENCE, eventually

from carrel.process.log_lines import JSONLines
from gpu_worker.errors import (
    CapacityError,
    InvalidLogits,
    NeverFits,
    RequestError,
    SlowConsumer,
    StoreUnavailable,
    WorkerError,
)
from gpu_worker.grammar import Grammars
from gpu_worker.records import SamplingParams
from gpu_worker.service import converters, servicer
from gpu_worker.service.converters import own_edition, read_request
from gpu_worker.service.server import SERVICE
from gpu_worker.store.sessions import Sessions
from gpu_worker.v1 import gpu_worker_pb2 as pb

GENERATE = f"/{SERVICE}/Generate"


def request(request_id="r", prompt=(5, 6, 7), max_tokens=4, **sampling):
    return pb.GenerateRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling=pb.SamplingParams(max_tokens=max_tokens, **sampling),
    )


async def collect(call):
    responses = []
    while (response := await call.read()) is not grpc.aio.EOF:
        responses.append(response)
    return responses


async def error_of(call):
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await collect(call)
    return error.value


async def code_of(call):
    try:
        await collect(call)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def assert_alive(worker):
    responses = await collect(worker.stub.Generate(request("alive"), timeout=PATIENCE))
    assert [r.token.token_id for r in responses if r.HasField("token")] == [5, 6, 7, 5]


@pytest.mark.parametrize("num_prompt", [1, 4, 6])
async def test_a_scored_prompt_comes_in_messages_before_the_first_token(worker, monkeypatch, num_prompt):
    monkeypatch.setattr(converters, "PROMPT_TOKENS", 3)
    asked = request(prompt=range(20, 20 + num_prompt), max_tokens=1, prompt_logprobs=2)
    responses = await collect(worker.stub.Generate(asked, timeout=PATIENCE))
    num_messages = -(-(num_prompt - 1) // 3)
    events = ["progress", *["prompt"] * num_messages, "token", "complete"]
    assert [r.WhichOneof("event") for r in responses] == events
    tokens = [token for r in responses for token in r.prompt.tokens]
    assert [(t.token_id, t.rank, t.logprob) for t in tokens] == [
        (21 + i, 1 + 3 * i, -1 - 3 * i) for i in range(num_prompt - 1)
    ]
    assert [[(top.token_id, top.logprob) for top in t.top] for t in tokens] == [
        [(2 + 3 * i, -2 - 3 * i), (3 + 3 * i, -3 - 3 * i)] for i in range(num_prompt - 1)
    ]


async def test_the_engine_has_its_turn_between_two_messages_of_a_scored_prompt(worker, monkeypatch):
    monkeypatch.setattr(converters, "PROMPT_TOKENS", 3)
    monkeypatch.setattr(servicer, "PROMPT_PAUSE_SECONDS", 3600.0)
    call = worker.stub.Generate(
        request(prompt=range(20, 26), max_tokens=1, prompt_logprobs=2), timeout=PATIENCE
    )
    assert [(await call.read()).WhichOneof("event") for _ in range(2)] == ["progress", "prompt"]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(call.read(), 0.2)
    call.cancel()


async def test_nothing_is_waited_for_behind_a_scored_prompts_last_message(worker, monkeypatch):
    monkeypatch.setattr(servicer, "PROMPT_PAUSE_SECONDS", 3600.0)
    asked = request(prompt=range(20, 26), max_tokens=1, prompt_logprobs=2)
    responses = await collect(worker.stub.Generate(asked, timeout=PATIENCE))
    assert [r.WhichOneof("event") for r in responses] == ["progress", "prompt", "token", "complete"]


async def test_generate_streams_progress_tokens_and_completion_in_order(worker):
    responses = await collect(worker.stub.Generate(request(logprobs=2), timeout=PATIENCE))
    assert [r.WhichOneof("event") for r in responses] == ["progress", *["token"] * 4, "complete"]
    assert (responses[0].progress.computed_tokens, responses[0].progress.cached_tokens) == (2, 1)
    assert [r.token.token_id for r in responses[1:-1]] == [5, 6, 7, 5]
    assert responses[1].token.logprob == pytest.approx(-0.5)
    assert [t.token_id for t in responses[1].token.top] == [5, 9]
    complete = responses[-1].complete
    assert complete.finish_reason == pb.FINISH_REASON_LENGTH
    assert (complete.usage.prompt_tokens, complete.usage.completion_tokens) == (3, 4)
    assert not complete.usage.HasField("attention_mass")


async def test_a_grammar_that_cannot_be_compiled_is_refused_and_the_engine_hears_nothing_of_it(
    worker, engine
):
    asked = request()
    asked.grammar.regex, asked.grammar.param = "a+", "guided_regex"
    error = await error_of(worker.stub.Generate(asked, timeout=PATIENCE))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    # the fake engine's model is none
    found = dict(error.trailing_metadata())
    assert (found["carrel-param"], found["carrel-code"]) == ("guided_regex", "grammar_unavailable")
    assert not engine.requests
    await assert_alive(worker)


async def test_callers_take_turns_at_compiling_grammars(worker, monkeypatch):
    compiled = []

    def compile(grammars, grammar):
        compiled.append((grammar.text, Future()))
        return compiled[-1][1]

    monkeypatch.setattr(Grammars, "compile", compile)
    calls = []
    for at, salt in enumerate(("one", "one", "one", "one", "two")):
        asked = request(request_id=str(at))
        asked.grammar.regex, asked.prefix_salt = f"{salt} {at}", salt.encode()
        calls.append(worker.stub.Generate(asked, timeout=PATIENCE))
        # it is taken, and its grammar waits
        await calls[-1].initial_metadata()
    for at in range(len(calls)):
        await eventually(lambda at=at: len(compiled) > at)
        assert len(compiled) == at + 1
        compiled[at][1].set_exception(RequestError("no", "guided_regex"))
    assert [text for text, _ in compiled] == ["one 0", "two 4", "one 1", "one 2", "one 3"]
    for call in calls:
        assert await code_of(call) == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_token_arrives_before_the_next_is_made(worker):
    call = worker.stub.Generate(request(max_tokens=2), timeout=PATIENCE)
    worker.engine.gate.clear()
    assert (await call.read()).HasField("progress")
    worker.engine.gate.set()
    assert (await call.read()).token.token_id == 5


async def test_requests_run_side_by_side(worker):
    calls = [worker.stub.Generate(request(f"r{i}", prompt=(i, i + 10)), timeout=PATIENCE) for i in range(5)]
    results = await asyncio.gather(*map(collect, calls))
    tokens = [[r.token.token_id for r in responses if r.HasField("token")] for responses in results]
    assert tokens == [[i, i + 10, i, i + 10] for i in range(5)]


async def test_request_fields_and_defaults_reach_the_engine(worker):
    message = request("a", max_tokens=None, seed=0, logit_bias={3: -1.0}, stop_token_ids=[4])
    await collect(worker.stub.Generate(message, timeout=PATIENCE))
    message = request("b")
    message.policy, message.budget.tokens, message.num_prefill_tokens, message.measure = "full", 12, 2, True
    message.prefix_salt, message.session_id, message.cache_salt = b"salt", "a chat", "mine"
    message.priority = -3
    await collect(worker.stub.Generate(message, timeout=PATIENCE))
    first, second = worker.engine.requests
    assert first.sampling.max_tokens == 61
    assert first.sampling == SamplingParams(61, seed=0, logit_bias=((3, -1.0),), stop_token_ids=(4,))
    assert (first.policy, first.budget.share) == ("pqcache", 0.1)
    assert (second.policy, second.budget.tokens, second.budget.share) == ("full", 12, None)
    assert (second.num_prefill_tokens, second.measure, second.prefix_salt) == (2, True, b"salt")
    assert (first.session_id, second.session_id) == ("", "a chat")
    assert (first.cache_salt, second.cache_salt) == ("", "mine")
    assert (first.priority, second.priority) == (0, -3)


async def test_a_cancelled_call_aborts_its_request(worker):
    worker.engine.endless = True
    call = worker.stub.Generate(request(), timeout=PATIENCE)
    await call.read()
    call.cancel()
    await eventually(lambda: worker.engine.aborted == ["r"] and not worker.engine.has_work)


async def test_a_lost_connection_aborts_its_request(worker):
    worker.engine.endless = True
    async with grpc.aio.insecure_channel(worker.target) as channel:
        call = channel.unary_stream(GENERATE, pb.GenerateRequest.SerializeToString)(request())
        await call.read()
    await eventually(lambda: worker.engine.aborted == ["r"])


async def test_a_passed_deadline_aborts_its_request(worker):
    worker.engine.gate.clear()
    error = await error_of(worker.stub.Generate(request(), timeout=0.2))
    assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    await eventually(lambda: worker.engine.aborted == ["r"])


async def test_a_finished_request_is_not_aborted(worker):
    await collect(worker.stub.Generate(request(), timeout=PATIENCE))
    await assert_alive(worker)
    assert worker.engine.aborted == []


async def test_abort_ends_a_stream_and_ignores_unknown_ids(worker):
    worker.engine.endless = True
    call = worker.stub.Generate(request(), timeout=PATIENCE)
    await call.read()
    await worker.stub.Abort(pb.AbortRequest(request_id="unknown"), timeout=PATIENCE)
    await worker.stub.Abort(pb.AbortRequest(request_id="r"), timeout=PATIENCE)
    responses = await collect(call)
    assert responses[-1].complete.finish_reason == pb.FINISH_REASON_ABORT


async def test_a_slow_consumer_is_ended_and_others_go_on(worker):
    worker.engine.endless = True
    worker.engine.step_seconds = 0.0
    # so little that the transport cannot hide that nobody reads
    options = (("grpc.http2.lookahead_bytes", 1), ("grpc.http2.bdp_probe", 0))
    async with grpc.aio.insecure_channel(worker.target, options=options) as channel:
        call = channel.unary_stream(
            GENERATE, pb.GenerateRequest.SerializeToString, pb.GenerateResponse.FromString
        )(request(logprobs=1), timeout=PATIENCE)
        await call.read()
        await eventually(lambda: worker.engine.aborted == ["r"])
        worker.engine.endless = False
        await assert_alive(worker)
        error = await error_of(call)
        assert error.code() == grpc.StatusCode.ABORTED


@pytest.mark.parametrize(
    ("failure", "code", "metadata"),
    [
        (RequestError("bad x", "x"), grpc.StatusCode.INVALID_ARGUMENT, {"carrel-param": "x"}),
        (
            RequestError("long", "prompt", "context_length_exceeded"),
            grpc.StatusCode.INVALID_ARGUMENT,
            {"carrel-param": "prompt", "carrel-code": "context_length_exceeded"},
        ),
        (CapacityError("full"), grpc.StatusCode.RESOURCE_EXHAUSTED, {}),
        (
            NeverFits("too long"),
            grpc.StatusCode.INVALID_ARGUMENT,
            {"carrel-code": "context_length_exceeded"},
        ),
        (
            StoreUnavailable("gone"),
            grpc.StatusCode.UNAVAILABLE,
            {"carrel-code": "store_unavailable"},
        ),
        (SlowConsumer("slow"), grpc.StatusCode.ABORTED, {}),
        (InvalidLogits("r"), grpc.StatusCode.INTERNAL, {}),
        (WorkerError("odd"), grpc.StatusCode.INTERNAL, {}),
    ],
)
async def test_every_worker_error_has_its_status(worker, failure, code, metadata):
    worker.engine.failure = failure
    error = await error_of(worker.stub.Generate(request(), timeout=PATIENCE))
    assert error.code() == code
    assert error.details() == str(failure)
    found = {key: value for key, value in error.trailing_metadata() if key.startswith("carrel-")}
    assert found == metadata
    worker.engine.failure = None
    await assert_alive(worker)


async def test_an_unexpected_error_shows_no_inner_text(worker):
    worker.engine.gate.clear()
    call = worker.stub.Generate(request(), timeout=PATIENCE)
    await call.read()
    worker.engine.fail("r", ValueError("/secret/path"))
    error = await error_of(call)
    assert error.code() == grpc.StatusCode.INTERNAL
    assert "secret" not in error.details()


async def test_the_overflow_of_the_queue_is_refused_at_once(worker):
    worker.engine.gate.clear()
    calls = [worker.stub.Generate(request(f"r{i}"), timeout=PATIENCE) for i in range(5)]
    for call in calls:
        await call.read()
    error = await error_of(worker.stub.Generate(request("r5"), timeout=PATIENCE))
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "--max-queue" in error.details()
    worker.engine.gate.set()
    for call in calls:
        assert (await collect(call))[-1].HasField("complete")


async def test_a_running_request_id_is_refused_and_free_again_later(worker):
    worker.engine.gate.clear()
    call = worker.stub.Generate(request(), timeout=PATIENCE)
    await call.read()
    error = await error_of(worker.stub.Generate(request(), timeout=PATIENCE))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert ("carrel-param", "request_id") in tuple(error.trailing_metadata())
    worker.engine.gate.set()
    assert len(await collect(call)) == 5
    assert len(await collect(worker.stub.Generate(request(), timeout=PATIENCE))) == 6


async def test_info_and_stats(worker):
    info = await worker.stub.GetInfo(pb.GetInfoRequest(), timeout=PATIENCE)
    assert (info.model, info.vocab_size, list(info.eos_token_ids)) == ("fake", 100, [0])
    assert list(info.policies) == ["full", "pqcache"]
    assert info.default_budget.share == pytest.approx(0.1)
    assert info.version
    worker.engine.gate.clear()
    call = worker.stub.Generate(request(), timeout=PATIENCE)
    await call.read()
    await eventually(lambda: worker.port.stats().running == 1)
    stats = await worker.stub.Stats(pb.StatsRequest(), timeout=PATIENCE)
    assert (stats.running, stats.waiting, stats.slot_capacity_tokens) == (1, 0, 10)
    assert stats.store_reachable
    call.cancel()


@pytest.mark.parametrize("version", ["9.9.9", ""])
async def test_a_caller_of_another_version_is_refused_with_both_named(worker, version):
    message = request()
    message.edition.CopyFrom(pb.Edition(version=version, messages=own_edition().messages))
    error = await error_of(worker.stub.Generate(message, timeout=PATIENCE))
    assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert version in error.details()
    assert str(own_edition()) in error.details()
    info = await worker.stub.GetInfo(pb.GetInfoRequest(), timeout=PATIENCE)
    message.edition.CopyFrom(pb.Edition(version=info.version, messages=info.messages))
    assert (await collect(worker.stub.Generate(message, timeout=PATIENCE)))[-1].HasField("complete")


async def test_health_follows_the_server(worker):
    stub = health_pb2_grpc.HealthStub(worker.channel)
    for name in ("", SERVICE):
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=PATIENCE)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    await worker.server.stop_serving()
    for name in ("", SERVICE):
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=PATIENCE)
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_reflection_lists_the_service(worker):
    stub = reflection_pb2_grpc.ServerReflectionStub(worker.channel)
    asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    (answer,) = await collect(stub.ServerReflectionInfo(asked, timeout=PATIENCE))
    assert SERVICE in {service.name for service in answer.list_services_response.service}


async def test_the_socket_is_for_its_owner_alone(worker):
    path = worker.target.removeprefix("unix:")
    assert os.stat(path).st_mode & 0o777 == 0o600


async def test_random_bytes_are_refused_and_the_server_lives_on(worker):
    rng = random.Random(0)
    generate = worker.channel.unary_stream(GENERATE)
    others = [worker.channel.unary_unary(f"/{SERVICE}/{name}") for name in ("Abort", "GetInfo", "Stats")]
    valid = request(logit_bias={1: 2.0}, stop_token_ids=[1]).SerializeToString()
    allowed = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.OK}
    for _ in range(150):
        blob = rng.randbytes(rng.randrange(1, 60))
        call = generate(blob, timeout=PATIENCE)
        error = await error_of(call)
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, (blob, error.details())
        assert "Traceback" not in error.details()
        # a valid message with some bytes changed may stay valid
        broken = bytearray(valid)
        for _ in range(3):
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        assert await code_of(generate(bytes(broken), timeout=PATIENCE)) in allowed, bytes(broken)
        call = others[rng.randrange(3)](blob, timeout=PATIENCE)
        assert await call.code() in allowed
    await assert_alive(worker)


async def test_an_oversized_message_is_refused(worker):
    message = request(prompt=[1] * 6_000_000)
    error = await error_of(worker.stub.Generate(message, timeout=PATIENCE))
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    await assert_alive(worker)


async def test_a_request_is_said_to_be_taken_while_the_engine_is_busy(worker):
    begun, go_on = threading.Event(), threading.Event()

    def step():
        begun.set()
        return go_on.wait(PATIENCE)

    worker.engine.step = step
    first = worker.stub.Generate(request("first"), timeout=PATIENCE)
    assert await asyncio.to_thread(begun.wait, PATIENCE)
    second = worker.stub.Generate(request("second"), timeout=PATIENCE)
    await asyncio.wait_for(second.initial_metadata(), PATIENCE)
    assert len(worker.engine.requests) == 1
    first.cancel()
    second.cancel()
    go_on.set()


async def test_sessions_of_a_caller_are_listed_pinned_and_dropped(worker):
    sessions = Sessions(worker.store)
    for salt, session_id in ((b"me", "one"), (b"me", "two"), (b"them", "one")):
        message = pb.GenerateRequest(request_id="r", prompt_token_ids=[1], prefix_salt=salt)
        message.session_id = session_id
        asked = read_request(message, INFO)
        worker.store.hold(*sessions.name_of(asked), sessions.owner_of(asked))
    asked = pb.ListSessionsRequest(prefix_salt=b"me")
    listed = await worker.stub.ListSessions(asked, timeout=PATIENCE)
    assert [held.session_id for held in listed.sessions] == ["one", "two"]
    assert listed.slab_tokens == 64

    pin = pb.PinSessionRequest(prefix_salt=b"me", session_id="two", pinned=True, seconds=5)
    assert (await worker.stub.PinSession(pin, timeout=PATIENCE)).found
    asked.session_id = "two"
    [two] = (await worker.stub.ListSessions(asked, timeout=PATIENCE)).sessions
    assert (two.pinned, two.expires_at, two.tokens, two.bytes) == (True, 5, 64, 512)
    for fields, param, code in (
        ({"session_id": "one", "pinned": True}, "pinned", "pin_limit"),
        ({"session_id": "two", "pinned": True, "seconds": -1}, "ttl_seconds", None),
        ({"session_id": "two", "pinned": True, "seconds": float("nan")}, "ttl_seconds", None),
    ):
        message = pb.PinSessionRequest(prefix_salt=b"me", **fields)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await worker.stub.PinSession(message, timeout=PATIENCE)
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        trailing = dict(refused.value.trailing_metadata())
        assert (trailing["carrel-param"], trailing.get("carrel-code")) == (param, code)

    drop = pb.DropSessionRequest(prefix_salt=b"me", session_id="one")
    assert [(await worker.stub.DropSession(drop, timeout=PATIENCE)).found for _ in range(2)] == [True, False]
    theirs = await worker.stub.ListSessions(pb.ListSessionsRequest(prefix_salt=b"them"), timeout=PATIENCE)
    assert len(theirs.sessions) == 1


async def test_the_stores_figures_are_passed_on(worker):
    told = await worker.stub.StoreStats(pb.StoreStatsRequest(), timeout=PATIENCE)
    assert (told.arena_bytes, told.leases, told.evicted_bytes_total) == (4096, 1, 512)
    assert (told.gathered_rows_total, told.index_training_seconds_total) == (7, 0.5)
    calls = pb.StoreCalls(method="Begin", seconds=0.75, counts=[2, 1], codes={"OK": 3})
    assert (list(told.call_bounds), list(told.calls)) == ([0.5], [calls])
    assert told.gather_seconds == pb.Histogram(bounds=[0.5], counts=[1, 2], sum=3.0)
    assert (told.disk_lookup_tokens_total, told.disk_hit_tokens_total, told.index_queue_length) == (20, 11, 6)


async def test_a_store_that_hangs_holds_up_nobody_who_asks_for_sessions_or_figures(worker):
    worker.store.gate.clear()
    for call in (
        worker.stub.ListSessions(pb.ListSessionsRequest(prefix_salt=b"me"), timeout=PATIENCE),
        worker.stub.StoreStats(pb.StoreStatsRequest(), timeout=PATIENCE),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as away:
            await call
        assert away.value.code() == grpc.StatusCode.UNAVAILABLE
        assert dict(away.value.trailing_metadata())["carrel-code"] == "store_unavailable"
    worker.store.gate.set()
    assert not (await worker.stub.ListSessions(pb.ListSessionsRequest(), timeout=PATIENCE)).sessions


async def test_a_request_is_told_of_in_the_log_and_its_trace_while_it_runs(worker, caplog):
    caplog.handler.setFormatter(JSONLines("gpu_worker"))
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    worker.engine.gate.clear()
    call = worker.stub.Generate(request(), timeout=PATIENCE, metadata=(("traceparent", traceparent),))
    await call.read()
    # by which calls to the store say it
    assert str(worker.traces.find("r")) == traceparent
    with caplog.at_level(logging.INFO, "gpu_worker.service.servicer"):
        worker.engine.gate.set()
        await collect(call)
        await eventually(lambda: worker.traces.find("r") is None)
    line = json.loads(caplog.text)
    assert (line["request_id"], line["trace_id"]) == ("r", "0af7651916cd43dd8448eb211c80319c")
    assert line["message"].startswith("r: length after 4 tokens to 3, ")
