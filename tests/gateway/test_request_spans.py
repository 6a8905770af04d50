"""A request's spans over its three processes, which are all in this one here: one trace, each within the right one."""

from __future__ import annotations

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from gateway_stack import write_tokenizer
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from waiting import PATIENCE, eventually

sys.path.append(str(Path(__file__).parents[1] / "gpu_worker/service"))

from fake_engine import INFO, FakeEngine

from carrel.process import otel
from carrel.process.options import OptionError
from carrel.process.otel import OTelTracer
from carrel.process.request_context import RequestContext, working_for
from carrel.process.trace_context import TraceContext
from carrel.process.tracing import NoTracer, Unseen, make_tracer
from gateway.config import GatewayConfig
from gateway.exchange import ChatRequest, GenerationOptions, Message
from gateway.server import create_service, load
from gateway.service import ChatService
from gateway.worker_client import GRPCWorkerClient
from gpu_worker.records import EventSink, GenerationRequest, Usage
from gpu_worker.service.engine_thread import EngineThread
from gpu_worker.service.server import WorkerServer
from gpu_worker.store.sessions import Sessions
from gpu_worker.store.traces import Traces, tell_phases
from kv_store.client import Layout, RowFormat, StoreClient
from kv_store.local import LocalStore

CLIENT = TraceContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")


class StoringEngine(FakeEngine):
    """Begins each request in the store, as the real one does."""

    def __init__(self, store: StoreClient) -> None:
        super().__init__(replace(INFO, vocab_size=300, max_model_len=256))
        self._store = store

    def submit(self, request: GenerationRequest, sink: EventSink) -> None:
        self._store.begin(request.request_id, 8)
        super().submit(request, sink)


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracer(exporter: InMemorySpanExporter) -> OTelTracer:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return OTelTracer(provider)


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    spans = exporter.get_finished_spans()
    found = {span.name: span for span in spans}
    assert len(found) == len(spans)
    return found


async def chat(service: ChatService, trace: TraceContext | None, fails: bool = False) -> None:
    options = GenerationOptions(model="no such" if fails else None)
    options.draft.sampling.max_tokens = 3
    with working_for(RequestContext("r1", trace)):
        generation = service.chat(ChatRequest((Message("user", "hello"),), options, request_id="r1"))
        async for _ in generation.events:
            pass


async def test_a_request_is_one_trace_from_its_client_to_the_store(
    tmp_path: Path, exporter: InMemorySpanExporter, tracer: OTelTracer
) -> None:
    config = GatewayConfig(
        model=str(write_tokenizer(tmp_path / "tiny")), worker=f"unix:{tmp_path}/w", no_warmup=True
    )
    traces = Traces(tracer)
    with LocalStore(8 << 20, slab_bytes=4096, tracer=tracer) as store:
        client = StoreClient.connect(
            store.target,
            Layout(1, 1, RowFormat(8, "fp32")),
            worker_id="w",
            trace_of=traces.find,
            timeout_seconds=PATIENCE,
        )
        engine = EngineThread(StoringEngine(client), 3, lambda: None)
        server = WorkerServer(engine, Sessions(client), config.worker, traces=traces)
        await server.start()
        worker = GRPCWorkerClient(config.worker)
        service = create_service(config, worker, *load(config), tracer)
        await chat(service, CLIENT)
        await eventually(lambda: "generate" in by_name(exporter))
        spans = by_name(exporter)
        with pytest.raises(Exception, match="no such"):
            await chat(service, None, fails=True)
        await worker.close()
        await asyncio.to_thread(engine.close)
        await server.stop(0)
        client.close()

    def parent_of(name: str) -> str:
        parent = spans[name].parent
        assert parent is not None
        return f"{parent.span_id:016x}"

    def id_of(name: str) -> str:
        return f"{spans[name].context.span_id:016x}"

    # the heartbeat and the attachment are part of none
    assert spans.keys() == {"chat", "generate", "Begin"}
    assert {f"{span.context.trace_id:032x}" for span in spans.values()} == {CLIENT.trace_id}
    assert parent_of("chat") == CLIENT.span_id
    assert parent_of("generate") == id_of("chat")
    assert parent_of("Begin") == id_of("generate")
    told = spans["chat"].attributes
    assert (told["carrel.request_id"], told["gen_ai.usage.output_tokens"]) == ("r1", 3)
    assert spans["generate"].attributes["carrel.request_id"].startswith("r1-0-")
    assert "hello" not in "".join(span.to_json() for span in spans.values())
    # without a client's trace it is one of its own, and says how it failed
    failed = exporter.get_finished_spans()[-1]
    assert (failed.name, failed.parent, failed.status.status_code) == ("chat", None, StatusCode.ERROR)
    assert failed.status.description == "UnknownModel"


def test_phases_are_parts_of_a_request_one_after_the_other(
    exporter: InMemorySpanExporter, tracer: OTelTracer
) -> None:
    span = tracer.start("generate", CLIENT, {})
    tell_phases(
        span, Usage(policy="pqcache", completion_tokens=5, queue_ms=10, prefill_ms=200, decode_ms=3000)
    )
    span.end()
    spans = by_name(exporter)
    # no index was waited for
    assert spans.keys() == {"queue", "prefill", "decode", "generate"}
    took = {
        name: round((spans[name].end_time - spans[name].start_time) / 1e6)
        for name in ("queue", "prefill", "decode")
    }
    assert took == {"queue": 10, "prefill": 200, "decode": 3000}
    assert abs(spans["queue"].end_time - spans["prefill"].start_time) < 1000
    assert abs(spans["prefill"].end_time - spans["decode"].start_time) < 1000
    assert {spans[name].parent.span_id for name in took} == {spans["generate"].context.span_id}
    assert spans["generate"].attributes["carrel.policy"] == "pqcache"


def test_what_the_client_does_not_sample_is_not_collected_and_goes_on(
    exporter: InMemorySpanExporter, tracer: OTelTracer
) -> None:
    span = tracer.start("chat", replace(CLIENT, flags=0), {})
    assert span.trace is not None
    assert (span.trace.trace_id, span.trace.is_sampled) == (CLIENT.trace_id, False)
    span.end()
    assert not exporter.get_finished_spans()


def test_without_an_endpoint_nothing_is_loaded_and_traces_are_passed_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "carrel.process.otel", None)
    variable = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317"}
    for environment in ({}, {**variable, "OTEL_SDK_DISABLED": "true"}, variable):
        tracer = make_tracer("gateway", None, environment)
        assert type(tracer) is NoTracer
        assert tracer.start("chat", CLIENT, {}) == Unseen(CLIENT)
    # as where OpenTelemetry is not installed
    with pytest.raises(OptionError, match="carrel\\[tracing\\]"):
        make_tracer("gateway", "http://collector:4317", {})


@pytest.mark.parametrize("scheme", ["unix", "http"])
def test_spans_are_sent_to_a_collector(tmp_path: Path, scheme: str) -> None:
    got: list[bytes] = []

    def export(request: bytes, context: grpc.ServicerContext) -> bytes:
        got.append(request)
        return b""

    service = "opentelemetry.proto.collector.trace.v1.TraceService"
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler(
                service, {"Export": grpc.unary_unary_rpc_method_handler(export)}
            ),
        )
    )
    if scheme == "unix":
        endpoint = f"unix:{tmp_path}/collector"
        server.add_insecure_port(endpoint)
    else:
        endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    tracer = make_tracer("gateway", endpoint, {})
    tracer.start("chat", CLIENT, {"carrel.request_id": "r1"}).end()
    tracer.close()
    server.stop(0)
    assert b"carrel-gateway" in got[0]
    assert bytes.fromhex(CLIENT.trace_id) in got[0]
    assert b"r1" in got[0]


def test_a_collector_that_is_away_holds_up_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otel, "CLOSE_SECONDS", 0.1)
    tracer = make_tracer("gateway", f"unix:{tmp_path}/nobody", {})
    assert type(tracer) is OTelTracer
    tracer.start("chat", None, {}).end()
    tracer.close()
