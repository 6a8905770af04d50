"""Test the options of `carrel serve`, and which process gets which; ../process tests how options are read."""

from __future__ import annotations

from pathlib import Path

from carrel.process.command_line import Parser, add_options
from carrel.process.options import options_of
from carrel.process.settings import Resolved, read
from carrel.serve.children import child_specs
from carrel.serve.endpoints import Endpoints
from carrel.serve.options import ServeOptions
from gateway.config import GatewayConfig, parse_config
from gpu_worker.config import WorkerConfig, parse_arguments
from kv_store.config import StoreConfig
from kv_store.config import parse_config as parse_store

# python -P -m package
COMMAND_LENGTH = 4


def resolved(*argv: str) -> Resolved[ServeOptions]:
    parser = Parser(prog="carrel serve")
    add_options(parser, ServeOptions)
    return read(ServeOptions, vars(parser.parse_args(argv)))


def processes(*argv: str) -> tuple[StoreConfig, WorkerConfig, GatewayConfig]:
    """Return the configuration that each of the three processes reads from the command that is started."""
    specs = child_specs(
        "some/model", resolved(*argv).texts, Endpoints(Path("/run/x"), "127.0.0.1", 8000, 8001)
    )
    store, worker, gateway = (spec.argv[COMMAND_LENGTH:] for spec in specs)
    return parse_store(store), parse_arguments(worker), parse_config(gateway)


def test_every_option_of_a_process_is_one_of_serve() -> None:
    # how the processes reach each other is not the user's to say
    wired = {"listen", "arena_socket", "runtime", "max_restarts", "store", "store_timeout_s", "worker"}
    wired |= {"allow_remote", "json_events", "store_token", "store_token_file"}
    # what only experiments set
    wired |= {"granularity", "lease_seconds"}
    wired |= {"store_ca_file", "allow_plain_store", "store_ssl_keyfile", "store_ssl_certfile"}
    wired |= {"worker_ssl_keyfile", "worker_ssl_certfile", "worker_client_ca_file"}
    wired |= {"worker_ca_file", "worker_client_keyfile", "worker_client_certfile", "allow_plain_worker"}
    known = {each.field for each in options_of(ServeOptions)}
    for kind in (StoreConfig, WorkerConfig, GatewayConfig):
        assert {each.field for each in options_of(kind)} - known <= wired


def test_an_option_reaches_the_processes_that_take_it() -> None:
    store, worker, gateway = processes(
        *("--policy", "quest", "--budget", "0.2", "--arena-bytes", "1GiB", "--revision", "main"),
        *("--host", "::1", "--shutdown-timeout", "3", "--prefix-cache", "off", "--allow-open"),
        *("--max-concurrent", "7", "--max-body-bytes", "1M", "--request-timeout", "60", "--heartbeat", "5"),
        *("--allowed-origins", "https://a.example", "https://b.example", "--max-queue", "3"),
        *("--calibration", "file", "--no-warmup"),
    )
    assert store.arena_bytes == 2**30
    assert (worker.policy, worker.budget.share, worker.prefix_cache) == ("quest", 0.2, False)
    assert (worker.max_queue, worker.calibration) == (3, "file")
    assert (worker.no_warmup, gateway.no_warmup) == (True, True)
    assert (worker.revision, gateway.revision) == ("main", "main")
    assert (worker.shutdown_timeout_s, gateway.shutdown_timeout_s) == (3.0, 3.0)
    assert (gateway.host, gateway.allow_open, gateway.max_concurrent) == ("::1", True, 7)
    assert (gateway.max_body_bytes, gateway.request_timeout_s, gateway.heartbeat_s) == (2**20, 60.0, 5.0)
    assert gateway.allowed_origins == ("https://a.example", "https://b.example")


def test_what_nobody_names_is_left_to_the_processes() -> None:
    store, worker, gateway = processes("--arena-bytes", "8M")
    assert worker == WorkerConfig(
        model="some/model",
        listen="unix:/run/x/gpu_worker.sock",
        store="unix:/run/x/kv_store.sock",
        json_events=True,
        log_format="text",
    )
    assert store == StoreConfig(
        listen="unix:/run/x/kv_store.sock", arena_bytes=2**23, json_events=True, log_format="text"
    )
    # quiet, since the banner says what is served
    assert gateway.log_level == "warning"
    assert [process.log_level for process in processes("--log-level", "debug")] == ["debug"] * 3


def test_names_of_vllm_are_taken() -> None:
    _, worker, gateway = processes(
        *("--max-num-batched-tokens", "512", "--gpu-memory-utilization", "0.8", "--seed", "4"),
        *("--enforce-eager", "--tokenizer", "other/model"),
        *("--root-path", "/llm", "--uds", "/run/http.sock", "--served-model-name", "a", "b"),
        *("--kv-policy", "quest", "--kv-store-memory", "4GiB"),
    )
    assert (worker.prefill_chunk, worker.gpu_memory_limit, worker.seed) == (512, 0.8, 4)
    assert (worker.enforce_eager, worker.policy) == (True, "quest")
    assert (gateway.tokenizer, gateway.root_path, gateway.uds) == (
        "other/model",
        "/llm",
        Path("/run/http.sock"),
    )
    assert gateway.model_names == ("a", "b")
