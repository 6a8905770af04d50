import dataclasses

import pytest

from gpu_worker.arguments import parse_arguments, parse_budget, parse_bytes, parse_hot_cache
from gpu_worker.config import HotCache, WorkerConfig, row_type
from gpu_worker.errors import ConfigError
from gpu_worker.records import Budget

NEEDED = ["model-dir", "--listen", "unix:/run/w.sock", "--store", "unix:/run/s.sock", "--device", "cpu"]


def parse(*flags, **environ):
    return parse_arguments([*NEEDED, *flags], environ)


def test_defaults():
    config = parse()
    assert (config.model, config.listen, config.store) == (
        "model-dir",
        "unix:/run/w.sock",
        "unix:/run/s.sock",
    )
    assert config == WorkerConfig("model-dir", "unix:/run/w.sock", "unix:/run/s.sock", device="cpu")
    assert (config.max_num_seqs, config.max_queue, config.prefill_chunk) == (8, 64, 2048)
    assert (config.policy, config.budget, config.transport) == ("pqcache", Budget(share=0.1), "zero_copy")
    assert config.hot_cache.is_auto
    assert config.max_model_len is None
    assert not config.json_events


def test_flags_win_over_the_environment_and_it_over_defaults():
    environ = {
        "CARREL_MAX_QUEUE": "5",
        "CARREL_PREFILL_CHUNK": "64",
        "CARREL_UNKNOWN": "x",
        "CARREL_SEED": "",
    }
    config = parse("--max-queue", "7", **environ)
    assert (config.max_queue, config.prefill_chunk, config.seed) == (7, 64, None)


def test_every_field_has_a_flag_and_a_variable():
    environ = {
        "CARREL_MODEL": "m",
        "CARREL_LISTEN": "127.0.0.1:8101",
        "CARREL_STORE": "store:9000",
        "CARREL_ALLOW_REMOTE": "yes",
        "CARREL_STORE_TIMEOUT": "1.5",
        "CARREL_STORE_TOKEN": "of sixteen or more",
        "CARREL_DEVICE": "cuda:1",
        "CARREL_DTYPE": "float16",
        "CARREL_THREADS": "3",
        "CARREL_MAX_MODEL_LEN": "4096",
        "CARREL_MAX_NUM_SEQS": "2",
        "CARREL_MAX_QUEUE": "0",
        "CARREL_PREFILL_CHUNK": "128",
        "CARREL_POLICY": "full",
        "CARREL_BUDGET": "256",
        "CARREL_HOT_CACHE": "0.5",
        "CARREL_GPU_MEMORY_LIMIT": "24GiB",
        "CARREL_SLOT_MEMORY": "512MiB",
        "CARREL_TRANSPORT": "shm",
        "CARREL_INDEX_DEVICE": "gpu",
        "CARREL_PREFIX_CACHE": "off",
        "CARREL_FULL_LAYERS": "2",
        "CARREL_PQ_SUBVECTORS": "4",
        "CARREL_PQ_BITS": "8",
        "CARREL_PQ_ITERATIONS": "9",
        "CARREL_PQ_METRIC": "ip",
        "CARREL_CLUSTERKV_TOKENS_PER_CLUSTER": "40",
        "CARREL_CLUSTERKV_METRIC": "l2",
        "CARREL_CALIBRATION": "/data/calibration.safetensors",
        "CARREL_OUTLIER_SHARE": "0.1",
        "CARREL_GRANULARITY": "q_head",
        "CARREL_LOAD_FORMAT": "safetensors",
        "CARREL_REVISION": "main",
        "CARREL_SEED": "11",
        "CARREL_SHUTDOWN_TIMEOUT": "3",
        "CARREL_JSON_EVENTS": "true",
    }
    config = parse_arguments([], environ)
    expected = WorkerConfig(
        model="m",
        listen="127.0.0.1:8101",
        store="store:9000",
        allow_remote=True,
        store_timeout_seconds=1.5,
        store_token="of sixteen or more",
        device="cuda:1",
        dtype="float16",
        threads=3,
        max_model_len=4096,
        max_num_seqs=2,
        max_queue=0,
        prefill_chunk=128,
        policy="full",
        budget=Budget(tokens=256),
        hot_cache=HotCache(share=0.5),
        gpu_memory_limit_bytes=24 * 2**30,
        slot_memory_bytes=512 * 2**20,
        transport="shm",
        index_device="gpu",
        prefix_cache="off",
        full_layers=2,
        pq_num_subvectors=4,
        pq_nbits=8,
        pq_iterations=9,
        pq_metric="ip",
        clusterkv_tokens_per_cluster=40,
        clusterkv_metric="l2",
        calibration="/data/calibration.safetensors",
        outlier_share=0.1,
        granularity="q_head",
        load_format="safetensors",
        revision="main",
        seed=11,
        shutdown_timeout_seconds=3.0,
        json_events=True,
    )
    assert config == expected
    # all but the file, which takes the token's place
    assert len(environ) == len(dataclasses.fields(WorkerConfig)) - 1
    flags = []
    for name, text in environ.items():
        flag = "--" + name.removeprefix("CARREL_").lower().replace("_", "-")
        if name == "CARREL_MODEL":
            flags.append(text)
        elif text in ("yes", "true"):
            flags.append(flag)
        else:
            flags += [flag, text]
    assert parse_arguments(flags, {}) == expected


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("0.1", Budget(share=0.1)),
        ("1", Budget(share=1.0)),
        ("1.0", Budget(share=1.0)),
        ("1e-3", Budget(share=0.001)),
        ("2", Budget(tokens=2)),
        ("2048", Budget(tokens=2048)),
    ],
)
def test_budget_is_a_share_or_a_number_of_tokens(text, budget):
    assert parse_budget(text) == budget


@pytest.mark.parametrize(
    "text", ["0", "0.0", "-1", "-0.5", "1.5", "2.0", "nan", "inf", "", "many", "1e3", "9" * 400]
)
def test_other_budgets_are_refused(text):
    with pytest.raises(ConfigError, match="--budget"):
        parse_budget(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("auto", None),
        ("512MiB", 2**29),
        ("2GiB", 2**31),
        ("1.5 GiB", 3 * 2**29),
        ("1048576", 2**20),
        ("4096kib", 2**22),
    ],
)
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["2GB", "x", "-1MiB", "", "1e9", "MiB"])
def test_other_sizes_are_refused(text):
    with pytest.raises(ConfigError, match="512MiB"):
        parse_bytes(text)


def test_hot_cache():
    assert parse_hot_cache("auto") == HotCache()
    assert parse_hot_cache("0.25") == HotCache(share=0.25)
    assert parse_hot_cache("4096") == HotCache(tokens=4096)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--listen", "0.0.0.0:8101"),
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
        ("--threads", "0"),
        ("--max-model-len", "1"),
        ("--max-num-seqs", "0"),
        ("--max-num-seqs", "2.5"),
        ("--max-queue", "-1"),
        ("--prefill-chunk", "0"),
        ("--hot-cache", "1.5"),
        ("--gpu-memory-limit", "10"),
        ("--gpu-memory-limit", "much"),
        ("--slot-memory", "10"),
        ("--transport", "pigeon"),
        ("--full-layers", "-1"),
        ("--pq-subvectors", "0"),
        ("--pq-bits", "9"),
        ("--pq-iterations", "-1"),
        ("--pq-metric", "cosine"),
        ("--clusterkv-tokens-per-cluster", "1"),
        ("--clusterkv-metric", "dot"),
        ("--outlier-share", "1.1"),
        ("--outlier-share", "few"),
        ("--load-format", "pickle"),
        ("--seed", "-1"),
        ("--seed", "1" * 50),
        ("--shutdown-timeout", "nan"),
        ("--shutdown-timeout", "-1"),
        ("--store-timeout", "soon"),
    ],
)
def test_a_bad_value_is_named_with_its_flag(flag, value):
    with pytest.raises(ConfigError) as error:
        parse(flag, value)
    assert flag in str(error.value)
    assert value in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("flags", [["--nonsense", "1"], ["--max-q", "3"], ["second-model"]])
def test_unknown_arguments_are_refused(flags):
    with pytest.raises(ConfigError, match="--help"):
        parse(*flags)


def test_a_bad_switch_in_the_environment_is_refused():
    with pytest.raises(ConfigError, match="maybe"):
        parse(CARREL_JSON_EVENTS="maybe")


@pytest.mark.parametrize("listen", ["localhost:1", "127.9.9.9:80", "[::1]:8101", "unix:relative.sock"])
def test_loopback_addresses_need_no_permission(listen):
    assert parse("--listen", listen).listen == listen


def test_a_remote_address_needs_permission():
    assert parse("--listen", "0.0.0.0:8101", "--allow-remote").allow_remote


def test_dtype_follows_device_and_model():
    config = parse()
    assert config.resolve_device() == "cpu"
    assert config.resolve_dtype("cpu", "bfloat16") == "float32"
    assert config.resolve_dtype("cuda:0", "float16") == "float16"
    assert config.resolve_dtype("cuda:0", "float32") == "bfloat16"
    assert config.resolve_dtype("cuda:0", None) == "bfloat16"
    assert parse("--dtype", "bfloat16").resolve_dtype("cpu", None) == "bfloat16"
    assert [row_type(name) for name in ("float32", "bfloat16", "float16")] == ["fp32", "bf16", "fp16"]


def test_a_store_that_selects_leaves_no_index_to_the_device():
    with pytest.raises(ConfigError, match=r"--index-device 'gpu'.*--transport grpc"):
        parse("--transport", "grpc", "--index-device", "gpu")


def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="CUDA devices"):
        parse("--max-num-seqs", "1", "--device", "cuda:99").resolve_device()


def test_a_record_with_both_kinds_of_budget_is_refused():
    with pytest.raises(ConfigError, match="budget"):
        WorkerConfig("m", "unix:/w", "unix:/s", budget=Budget(share=0.5, tokens=5))
    with pytest.raises(ConfigError, match="budget"):
        WorkerConfig("m", "unix:/w", "unix:/s", budget=Budget())
