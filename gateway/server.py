"""The process: everything is wired here, and ends here."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

from carrel.process.events import ProcessEvents
from carrel.process.request_limits import RANGES
from carrel.process.tracing import Tracer, make_tracer
from gateway.config import GatewayConfig
from gateway.errors import ConfigError
from gateway.first_request import FirstRequest
from gateway.listener import bind
from gateway.memory import keep_giving_back
from gateway.rest.server import RESTServer
from gateway.rpc.server import ChatServer
from gateway.service import ChatService
from gateway.tokenizer import Tokenizer, load_tokenizer, resolve_model_dir
from gateway.worker_client import GRPCWorkerClient, WorkerClient
from gpu_worker.v1 import gpu_worker_pb2 as pb

PARENT_INTERVAL_S = 0.5
# after draining, connections get this long: clients read what is finished, or the error of what was cut off
CLOSE_TIMEOUT_S = 2
# what a model's generation_config.json may say of sampling
DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

log = logging.getLogger(__name__)


async def serve(config: GatewayConfig) -> None:
    """Serve until SIGTERM, SIGINT or the parent's death, then drain. Raises ConfigError before anything is served."""
    parent = os.getppid()
    ended, hurried = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    _end_on_signals(loop, ended, hurried)
    tracer = make_tracer("gateway", config.otlp_endpoint)
    with bind(config) as listener:
        tokenizer, defaults = await asyncio.to_thread(load, config)
        worker = GRPCWorkerClient(config.worker, config.worker_identity)
        try:
            service = create_service(config, worker, tokenizer, defaults, tracer)
            await _run(config, service, listener, ended, hurried, parent)
        finally:
            await worker.close()
            await asyncio.to_thread(tracer.close)
            if config.uds is not None:
                config.uds.unlink(missing_ok=True)


def _end_on_signals(loop: asyncio.AbstractEventLoop, ended: asyncio.Event, hurried: asyncio.Event) -> None:
    """Set `ended` at the first signal, and `hurried` when one comes again.

    Counted by kind: a terminal's SIGINT or SIGHUP and a supervisor's SIGTERM are one wish.
    """
    seen: set[int] = set()

    def note(number: int) -> None:
        (hurried if number in seen else ended).set()
        seen.add(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, note, number)


async def _run(
    config: GatewayConfig,
    service: ChatService,
    listener: socket.socket,
    ended: asyncio.Event,
    hurried: asyncio.Event,
    parent: int,
) -> None:
    events = ProcessEvents("gateway", config.json_events, log_format=config.log_format)
    chat = ChatServer(config, service) if config.grpc_port else None
    rest = RESTServer(config, service, CLOSE_TIMEOUT_S)
    rest_task = asyncio.create_task(rest.serve([listener]))
    watch = asyncio.create_task(_watch_parent(parent, ended))
    memory = asyncio.create_task(keep_giving_back(service))
    try:
        if chat is not None:
            await chat.start()
        # A large body sets off full collections, which need not look at all that was imported.
        gc.collect()
        gc.freeze()
        where = _where(config, listener)
        events.ready(where if chat is None else f"{where}, chat gRPC on port {chat.port}")
        await asyncio.wait(
            {rest_task, watch, asyncio.create_task(ended.wait())}, return_when=asyncio.FIRST_COMPLETED
        )
        if service.admission.num_running:
            events.status(f"draining {service.admission.num_running} requests")
        if not await service.admission.drain(config.shutdown_timeout_s, hurried):
            log.warning("%d requests were cut off", service.admission.num_running)
            service.admission.cut_off()
    finally:
        watch.cancel()
        memory.cancel()
        rest.should_exit = True
        await asyncio.gather(rest_task, watch, memory, return_exceptions=True)
        if chat is not None:
            await chat.stop(CLOSE_TIMEOUT_S)


def create_service(
    config: GatewayConfig,
    worker: WorkerClient,
    tokenizer: Tokenizer,
    defaults: pb.SamplingParams,
    tracer: Tracer | None = None,
    more_metrics: Callable[[], bytes] = bytes,
) -> ChatService:
    """The service, which is ready when the worker has had a first request, unless `no_warmup`."""
    first = None if config.no_warmup else FirstRequest(config, worker, tokenizer, defaults)
    return ChatService(config, worker, tokenizer, defaults, more_metrics, first, tracer=tracer)


def load(config: GatewayConfig) -> tuple[Tokenizer, pb.SamplingParams]:
    """The tokenizer and the model's sampling defaults. Raises ConfigError."""
    model_dir = resolve_model_dir("--model", config.model, config.revision)
    tokenizer_dir = model_dir
    if config.tokenizer is not None:
        tokenizer_dir = resolve_model_dir("--tokenizer", config.tokenizer, None)
    tokenizer = load_tokenizer(tokenizer_dir, config.chat_template)
    # computed on first use otherwise, inside a request; the second compiles the chat template
    _ = tokenizer.max_chars_per_token, tokenizer.answer_lead
    return tokenizer, load_defaults(model_dir)


def _where(config: GatewayConfig, listener: socket.socket) -> str:
    if config.uds is not None:
        return f"unix:{config.uds}"
    host, port = listener.getsockname()[:2]
    scheme = "http" if config.ssl_certfile is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


async def _watch_parent(parent: int, ended: asyncio.Event) -> None:
    while os.getppid() == parent:
        await asyncio.sleep(PARENT_INTERVAL_S)
    ended.set()


def load_defaults(model_dir: Path) -> pb.SamplingParams:
    """From `generation_config.json`, where the model has one; `do_sample: false` means greedy. Raises ConfigError."""
    path = model_dir / "generation_config.json"
    if not path.is_file():
        return pb.SamplingParams()
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{path} cannot be read: {exc}") from exc
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no JSON object")
    known = {name: values[name] for name in DEFAULTED if values.get(name) is not None}
    if values.get("do_sample") is False:
        known["temperature"] = 0.0
    for name, value in known.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or value not in RANGES[name]:
            raise ConfigError(f"{path}: {name} is {value!r}; it must be a number in {RANGES[name]}")
    return pb.SamplingParams(**{**known, **({"top_k": int(known["top_k"])} if "top_k" in known else {})})
