"""Test what `carrel deploy` asks of Ray, and that two files ask for the same."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from commands import Command
from ray.serve.schema import ServeDeploySchema

from carrel.cluster.app import HEAD, ROUTER, build, gateway_options, replica_options
from carrel.cluster.options import gateway_config, read_arguments
from carrel.cluster.router import WishRouter
from carrel.cluster.services import store_config
from carrel.process.options import OptionError
from carrel.serve.endpoints import Endpoints

ROOT = Path(__file__).resolve().parents[3]
RAY = yaml.safe_load((ROOT / "deploy/ray/carrel.yaml").read_text())
KUBE, POLICY = yaml.safe_load_all((ROOT / "deploy/kuberay/carrel.yaml").read_text())
SERVE_CONFIG = yaml.safe_load(KUBE["spec"]["serveConfigV2"])


@pytest.mark.parametrize("config", [RAY, SERVE_CONFIG], ids=["ray", "kuberay"])
def test_serve_takes_the_files_and_the_builder_their_args(config: dict[str, Any]) -> None:
    schema = ServeDeploySchema.model_validate(config)
    (application,) = schema.applications
    module, _, builder = application.import_path.partition(":")
    assert (module, builder) == (build.__module__, build.__name__)
    options = read_arguments(application.args).options
    # nobody comes in without a key, wherever the proxies listen
    assert not options.allow_open
    with pytest.raises(OptionError, match="CARREL_API_KEY"):
        gateway_config(
            read_arguments({**application.args, "model": str(ROOT / "models/carrel-nano")}).options, {}
        )


def test_what_is_printed_is_what_serve_takes(carrel: Command) -> None:
    options = ("--port", "9000", "--max-replicas", "3", "--max-num-seqs", "4", "--name", "x")
    config = yaml.safe_load(carrel.output("deploy", "--print", *options))
    (application,) = ServeDeploySchema.model_validate(config).applications
    assert (application.name, config["http_options"]["port"]) == ("x", 9000)
    options = read_arguments(application.args).options
    assert (options.max_num_seqs, options.max_replicas, options.min_replicas) == (4, 3, 1)
    assert options.allow_open
    config = yaml.safe_load(carrel.output("deploy", "--print", "--host", "0.0.0.0"))
    assert not read_arguments(config["applications"][0]["args"]).options.allow_open


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"replicas": 2}, r"replicas \(args\): unknown option"),
        ({"min-replicas": 0}, "min-replicas '0' .*greater than or equal to 1"),
        ({"min-replicas": 3, "max-replicas": 2}, "max-replicas 2 is below --min-replicas 3"),
        ({"api-key": "secret"}, "CARREL_API_KEY"),
        ({"host": "0.0.0.0"}, "http_options.host"),
        ({"model": None}, "needs one value"),
        ({"policy": ["full"]}, "needs one value"),
        ({"gpus": "nan"}, "gpus 'nan' .*finite"),
    ],
)
def test_what_cannot_be_used_is_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message) as raised:
        read_arguments(arguments)
    assert "secret" not in str(raised.value)


def test_a_replica_is_one_placement_group_on_one_node_with_room_for_its_arena() -> None:
    options = read_arguments({"gpus": 1, "cpus": 2, "store-cpus": 4, "arena-bytes": "1GiB"}).options
    chosen = replica_options(options)
    assert chosen["placement_group_strategy"] == "STRICT_PACK"
    assert chosen["placement_group_bundles"] == [{"CPU": 2, "GPU": 1}, {"CPU": 4, "memory": 2**30}]
    assert chosen["ray_actor_options"] == {"num_cpus": 2, "num_gpus": 1}
    assert chosen["num_replicas"] == 1
    assert "autoscaling_config" not in chosen
    assert f"{WishRouter.__module__}.{WishRouter.__name__}" == ROUTER


def test_queues_are_bounded_streams_drain_and_replicas_follow_the_load() -> None:
    arguments = {
        "min-replicas": 1,
        "max-replicas": 4,
        "target-requests": 5,
        "max-requests": 6,
    }
    options = read_arguments(arguments | {"shutdown-timeout": 50}).options
    chosen = replica_options(options)
    scaling = chosen["autoscaling_config"]
    assert (scaling.min_replicas, scaling.max_replicas, scaling.target_ongoing_requests) == (1, 4, 5)
    # the gateway keeps to six; the rest is for reports, and bounded too
    assert 6 < chosen["max_ongoing_requests"] < 100
    assert 0 < chosen["max_queued_requests"] < 100
    for each in (chosen, gateway_options(options)):
        assert each["graceful_shutdown_timeout_s"] > 50


def test_the_gateway_runs_on_the_head_node() -> None:
    chosen = gateway_options(read_arguments({"max-concurrent": 10}).options)
    assert HEAD in chosen["ray_actor_options"]["resources"]
    assert chosen["ray_actor_options"]["num_cpus"] == 0
    # so that its own refusals, with their Retry-After, come before Serve's
    assert chosen["max_ongoing_requests"] > 10


def test_the_gateway_gets_its_keys_from_its_environment() -> None:
    options = read_arguments({"served-model-name": "m", "grpc-port": 0, "max-concurrent": 3}).options
    config = gateway_config(options, {"CARREL_API_KEY": "one,two"})
    assert (config.api_keys, config.model_names[0], config.max_concurrent) == (("one", "two"), "m", 3)
    options = read_arguments({"allow-open": True}).options
    assert gateway_config(options, {}).api_keys == ()
    # the replicas get a first request, unless that is not wanted
    assert not gateway_config(options, {}).no_warmup
    assert gateway_config(read_arguments({"allow-open": True, "no-warmup": True}).options, {}).no_warmup


def test_a_store_gets_whole_slabs() -> None:
    resolved = read_arguments({"arena-bytes": "1000000", "slab-bytes": "64KiB", "store-cpus": 3})
    config = store_config(resolved, Endpoints(Path("/run/x"), "127.0.0.1", 0, 0))
    assert (config.arena_bytes, config.num_trainers, config.runtime) == (15 * 65536, 3, "ray")
    # of the bundled model, as none is named
    resolved = read_arguments({"arena-bytes": "5MiB", "store-cpus": 3})
    config = store_config(resolved, Endpoints(Path("/run/x"), "127.0.0.1", 0, 0))
    assert (config.arena_bytes, config.slab_bytes) == (4 << 20, 256 << 10)


def test_the_kubernetes_manifest_is_what_kuberay_reads() -> None:
    assert (KUBE["apiVersion"], KUBE["kind"]) == ("ray.io/v1", "RayService")
    cluster = KUBE["spec"]["rayClusterConfig"]
    assert cluster["authOptions"] == {"mode": "token"}
    head, workers = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    for group in (head, *workers):
        assert all(type(value) is str for value in group["rayStartParams"].values())
        spec = group["template"]["spec"]
        assert spec["securityContext"]["runAsNonRoot"]
        for container in spec["containers"]:
            assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
            assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"]
            # the priority of any process, and nothing is killed where an arena fills the memory
            environment = {each["name"]: each.get("value") for each in container["env"]}
            assert environment["RAY_worker_niceness"] == environment["RAY_memory_monitor_refresh_ms"] == "0"


def test_a_worker_pod_has_room_for_a_replica_and_time_to_drain() -> None:
    options = read_arguments(SERVE_CONFIG["applications"][0]["args"]).options
    (group,) = KUBE["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    spec = group["template"]["spec"]
    asked = spec["containers"][0]["resources"]["requests"]
    assert float(asked["cpu"]) >= options.cpus + options.store_cpus
    assert float(asked["nvidia.com/gpu"]) >= options.gpus
    assert int(asked["memory"].removesuffix("Gi")) * 2**30 > (options.arena_bytes or 0)
    assert spec["terminationGracePeriodSeconds"] > options.shutdown_timeout_s
    assert (group["minReplicas"], group["maxReplicas"]) == (options.min_replicas, options.max_replicas)


def test_no_port_but_the_gateways_is_open_to_all() -> None:
    everyone, ours = POLICY["spec"]["ingress"]
    assert everyone == {"ports": [{"port": 8000, "protocol": "TCP"}]}
    assert all("podSelector" in peer for peer in ours["from"])


def test_taking_away_waits_longer_than_serve_does(monkeypatch: pytest.MonkeyPatch, carrel: Command) -> None:
    names, asked = [["carrel"]] * 3, list[str]()

    def slow(name: str) -> None:
        asked.append(name)
        raise TimeoutError("these were not deleted after 60 s")

    def status() -> SimpleNamespace:
        return SimpleNamespace(applications=names.pop() if names else [])

    monkeypatch.setattr("carrel.cluster.deployment.serve", SimpleNamespace(delete=slow, status=status))
    monkeypatch.setattr("carrel.cluster.deployment.POLL_S", 0.0)
    # the command sets them
    for name, value in {"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("ray.init", lambda **_: None)
    monkeypatch.setattr("ray.shutdown", lambda: None)
    assert carrel("deploy", "--remove").code == 0
    assert (asked, names) == (["carrel"], [])
    names += [["carrel"]] * 9
    error = carrel.refusal("deploy", "--remove", "--timeout", "0", code=1)
    assert "is not gone after 0 s; it goes on ending" in error
