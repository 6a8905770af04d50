"""Test which options a worker refuses; tests/carrel/process tests how options are read."""

import subprocess
import sys
from pathlib import Path

import pytest

from carrel.process.options import OptionError
from gpu_worker.config import WorkerConfig, find_device, find_dtype, parse_arguments
from gpu_worker.records import Budget, HotCacheSize

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ["model-dir", "--listen", "unix:/run/w.sock", "--store", "unix:/run/s.sock", "--device", "cpu"]


def parse(*flags):
    given = [flag for flag in NEEDED if flag not in flags]
    if "--listen" in flags:
        given.remove("unix:/run/w.sock")
    if "--store" in flags:
        given.remove("unix:/run/s.sock")
    if "--device" in flags:
        given.remove("cpu")
    return parse_arguments([*given, *flags])


def test_defaults():
    config = parse()
    assert config == WorkerConfig(
        model="model-dir", listen="unix:/run/w.sock", store="unix:/run/s.sock", device="cpu"
    )
    assert (config.max_num_seqs, config.max_queue, config.prefill_chunk) == (None, 256, 2048)
    assert (config.default_policy, config.budget, config.transport) == (
        "bitkeys",
        Budget(share=0.1),
        "zero_copy",
    )
    assert config.hot_cache.is_auto


def test_sizes_and_shares():
    config = parse("--slot-memory", "2GiB", "--hot-cache", "0.25", "--budget", "2048")
    assert (config.slot_memory_bytes, config.gpu_memory_limit) == (2**31, None)
    assert (config.hot_cache, config.budget) == (HotCacheSize(share=0.25), Budget(tokens=2048))
    config = parse("--gpu-memory-limit", "auto", "--hot-cache", "4096")
    assert (config.gpu_memory_limit, config.hot_cache) == (None, HotCacheSize(tokens=4096))


@pytest.mark.parametrize(
    ("text", "tokens"), [("131072", 131072), ("128K", 131072), ("128k", 128000), ("1M", 2**20), ("1m", 10**6)]
)
def test_a_length_may_have_a_unit(text, tokens):
    assert parse("--max-model-len", text).max_model_len == tokens


@pytest.mark.parametrize(
    ("name", "dtype"), [("half", "float16"), ("float", "float32"), ("bfloat16", "bfloat16")]
)
def test_types_have_the_names_of_other_servers(name, dtype):
    assert parse("--dtype", name).dtype == dtype


def test_settings_of_rope_are_a_field_of_the_configuration():
    yarn = '{"rope_type": "yarn", "factor": 4.0}'
    settings = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    for flag, text in (
        ("--rope-scaling", yarn),
        ("--hf-overrides", f'{{"rope_scaling": {yarn}}}'),
        ("--hf-overrides", yarn),
    ):
        assert parse(flag, text).hf_overrides == settings


def test_a_share_of_a_short_prompt_is_at_least_so_many_tokens():
    assert [parse().default_budget.resolve(length) for length in (40, 512, 8000)] == [512, 512, 800]
    assert parse("--budget", "64").default_budget.resolve(40) == 64


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--listen", "0.0.0.0:8101"),
        ("--max-model-len", "1"),
        ("--max-model-len", "1.5K"),
        ("--max-model-len", "17M"),
        ("--dtype", "int8"),
        ("--hf-overrides", "[1]"),
        ("--hf-overrides", "{"),
        ("--listen", "example.org:8101"),
        ("--listen", "127.0.0.1"),
        ("--listen", "127.0.0.1:0"),
        ("--listen", "127.0.0.1:65536"),
        ("--listen", "unix:"),
        ("--listen", "unix:/" + "a" * 120),
        ("--store", "nowhere"),
        ("--device", "tpu"),
        ("--device", "cuda:x"),
        ("--dtype", "float64"),
        ("--hot-cache", "1.5"),
        ("--load-format", "pickle"),
    ],
)
def test_a_bad_value_is_named_with_its_flag(flag, value):
    with pytest.raises(OptionError) as error:
        parse(flag, value)
    assert flag in str(error.value)
    assert value in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("default", "allowed", "reason"),
    [
        ("full", "full,x", "unknown policy 'x'"),
        ("pqcache", "full", "'pqcache', of --policy"),
        ("auto", "auto,full", "add bitkeys too"),
    ],
)
def test_allowed_policies_hold_all_that_can_be_chosen(default, allowed, reason):
    with pytest.raises(OptionError, match=f"--allowed-policies: .*{reason}"):
        parse("--policy", default, "--allowed-policies", allowed)
    parse("--policy", "auto", "--allowed-policies", "auto,full,bitkeys")


def test_one_limit_of_memory_is_a_size_or_a_share():
    assert parse("--gpu-memory-limit", "24GiB").gpu_memory_limit == 24 * 2**30
    assert parse("--gpu-memory-utilization", "0.5").gpu_memory_limit == 0.5
    for text in ("1.5", "0", "1K", "much"):
        with pytest.raises(OptionError, match=r"--gpu-memory-limit .*, or auto"):
            parse("--gpu-memory-limit", text)


@pytest.mark.parametrize("listen", ["localhost:1", "127.9.9.9:80", "[::1]:8101", "unix:relative.sock"])
def test_loopback_addresses_need_no_permission(listen):
    assert parse("--listen", listen).listen == listen


def test_a_remote_address_needs_permission():
    assert parse("--listen", "0.0.0.0:8101", "--allow-remote").allow_remote


def test_a_store_beyond_this_machine_is_called_over_tls_or_where_that_is_said_in_plain(tmp_path):
    certificates = tmp_path / "ca.pem"
    certificates.write_text("a certificate")
    for store in ("10.0.0.7:7000", "memory.example:7000"):
        with pytest.raises(OptionError, match=f"--store '{store}'.*--store-ca-file.*--allow-plain-store"):
            parse("--store", store)
        assert parse("--store", store, "--allow-plain-store").store == store
        assert parse("--store", store, "--store-ca-file", str(certificates)).store == store
    assert parse("--store", "127.0.0.1:7000").store == "127.0.0.1:7000"


def test_dtype_is_the_checkpoints_on_a_gpu_and_float32_on_a_cpu():
    assert find_dtype("auto", "cpu") == "float32"
    assert find_dtype("auto", "cuda") is None
    assert find_dtype("bfloat16", "cpu") == "bfloat16"


def test_a_store_that_selects_leaves_no_index_to_the_device():
    with pytest.raises(OptionError, match="--index-device gpu: with --transport grpc"):
        parse("--transport", "grpc", "--index-device", "gpu")


def test_a_device_that_is_not_there_is_refused():
    assert find_device("cpu") == "cpu"
    with pytest.raises(OptionError, match="CUDA devices"):
        find_device("cuda:99")


def test_a_record_is_made_and_an_engine_built_without_the_libraries_that_read_options():
    """Machines that only measure may lack them."""
    script = (
        "import sys\n"
        "sys.modules['pydantic'] = sys.modules['pydantic_settings'] = None\n"
        "import benchmarks.rivals.carrel_decode, benchmarks.rivals.carrel_prefill, gpu_worker.startup.build\n"
        "import benchmarks.commands.decode, gpu_worker.calibration.__main__, kv_store.config\n"
        "print(gpu_worker.config.WorkerConfig(model='m', listen='unix:/w', store='unix:/s').prefill_chunk)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert ended.stdout == "2048\n", ended.stderr
