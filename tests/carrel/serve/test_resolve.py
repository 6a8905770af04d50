"""Layers of options: precedence, names, values and secrets."""

from __future__ import annotations

from pathlib import Path

import pytest

from carrel.cli import build_parser
from carrel.errors import OptionError
from carrel.serve.flags import GATEWAY, STORE, WORKER, num_bytes
from carrel.serve.options import ServeOptions, child_arguments, flags
from carrel.serve.resolve import resolve
from gpu_worker.arguments import parse_arguments


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "carrel.yaml"


def test_command_line_over_environment_over_file_over_default(config: Path) -> None:
    config.write_text("port: 1001\nmax-num-seqs: 11\nmax-model-len: 4096\n")
    resolved = resolve(
        {"config": str(config), "port": "3003"}, {"CARREL_PORT": "2002", "CARREL_MAX_NUM_SEQS": "22"}
    )
    options = resolved.options
    assert (options.port, options.max_num_seqs, options.max_model_len, options.grpc_port) == (
        3003,
        22,
        4096,
        8001,
    )
    assert resolved.sources == {
        "port": "command line",
        "max_num_seqs": "environment",
        "max_model_len": "file",
    }


def test_the_file_may_come_from_the_environment(config: Path) -> None:
    config.write_text("kv-policy: clusterkv\n")
    assert resolve({}, {"CARREL_CONFIG": str(config)}).options.policy == "clusterkv"


def test_an_unknown_key_of_the_file_is_an_error_that_names_the_known_ones(config: Path) -> None:
    config.write_text("max-model-length: 4096\n")
    with pytest.raises(OptionError, match=r"unknown key 'max-model-length'; known keys: .*max-model-len"):
        resolve({"config": str(config)}, {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- port\n", "expected lines such as"),
        ("port: [1, 2]\n", "port needs one value"),
        ("port: {\n", "is not YAML"),
        ("policy: full\nkv-policy: full\n", "names both policy and kv-policy"),
        ("port: 99999\n", r"port '99999' \(file\): expected a port"),
        ("budget: 1.5\n", "expected a share"),
        ("max-num-seqs: many\n", "expected a number"),
    ],
)
def test_a_bad_file_is_refused(config: Path, text: str, message: str) -> None:
    config.write_text(text)
    with pytest.raises(OptionError, match=message):
        resolve({"config": str(config)}, {})


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="cannot read"):
        resolve({"config": str(tmp_path / "none.yaml")}, {})


def test_secrets_are_masked_where_options_are_shown() -> None:
    resolved = resolve({"api_key": "tell-nobody", "port": "9000"}, {"CARREL_BUDGET": "0.1"})
    shown = resolved.non_default()
    assert shown == {
        "api-key": "*** (command line)",
        "port": "9000 (command line)",
        "budget": "0.1 (environment)",
    }


def test_an_option_named_with_its_default_is_not_shown() -> None:
    assert resolve({"port": "8000"}, {}).non_default() == {}


def test_every_flag_goes_to_its_processes_and_to_no_other() -> None:
    options = ServeOptions(policy="quest", budget="0.1", arena_bytes=2**30, revision="main", host="::1")
    assert child_arguments(options, STORE) == ["--arena-bytes", str(2**30)]
    assert child_arguments(options, WORKER) == [
        *("--policy", "quest", "--budget", "0.1", "--revision", "main"),
        *("--shutdown-timeout", "30.0"),
    ]
    assert "--policy" not in child_arguments(options, GATEWAY)
    assert child_arguments(options, GATEWAY)[:2] == ["--host", "::1"]


@pytest.mark.parametrize("transport", ["zero_copy", "shm", "grpc"])
def test_choices_of_the_worker_reach_it(transport: str) -> None:
    options = resolve({"transport": transport, "full_layers": "2"}, {}).options
    assert child_arguments(options, WORKER)[:4] == ["--full-layers", "2", "--transport", transport]
    # the worker itself takes the words
    parse_arguments(["m", "--listen", "unix:/w", "--store", "unix:/s", *child_arguments(options, WORKER)])


@pytest.mark.parametrize(("name", "text"), [("transport", "pigeon"), ("full_layers", "-1")])
def test_what_the_worker_would_refuse_is_refused_at_once(name: str, text: str) -> None:
    with pytest.raises(OptionError, match="expected"):
        resolve({name: text}, {})


def test_switches(config: Path) -> None:
    assert "--allow-open" not in child_arguments(ServeOptions(), GATEWAY)
    config.write_text("allow-open: true\n")
    assert "--allow-open" in child_arguments(resolve({"config": str(config)}, {}).options, GATEWAY)
    assert resolve({"config": str(config)}, {"CARREL_ALLOW_OPEN": "0"}).options.allow_open is False
    argv = ["serve", "--allow-open"]
    assert vars(build_parser(argv).parse_args(argv))["allow_open"] == "true"
    config.write_text("allow-open: 7\n")
    with pytest.raises(OptionError, match="allow-open needs true or false"):
        resolve({"config": str(config)}, {})


def test_no_secret_is_ever_an_argument_of_a_process() -> None:
    assert [name for name, item in flags().items() if item.is_secret and item.to] == []


@pytest.mark.parametrize(
    ("text", "size"), [("1024", 1024), ("8GiB", 8 * 2**30), ("512m", 512 * 2**20), ("1.5 GB", 3 * 2**29)]
)
def test_sizes(text: str, size: int) -> None:
    assert num_bytes(text) == size


@pytest.mark.parametrize("text", ["", "-1", "8 apples", "0", "nan"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="expected a size"):
        num_bytes(text)


def test_the_command_line_takes_the_vllm_spellings() -> None:
    argv = [
        "serve",
        "some/model",
        "--kv-policy",
        "quest",
        "--kv-store-memory",
        "4GiB",
        "--max-model-len",
        "1024",
    ]
    arguments = vars(build_parser(argv).parse_args(argv))
    given = {name: text for name, text in arguments.items() if name != "command"}
    options = resolve(given, {}).options
    assert (options.model, options.policy, options.arena_bytes) == ("some/model", "quest", 4 * 2**30)
    assert options.max_model_len == 1024
