"""Options of policies reach them."""

from __future__ import annotations

import pytest
import torch

from gpu_worker.calibration import Calibration, ModelFacts
from gpu_worker.config import WorkerConfig
from gpu_worker.errors import ConfigError
from gpu_worker.policies.adakv.policy import AdaKV
from gpu_worker.policies.chelsea.policy import Chelsea
from gpu_worker.policies.clusterkv.policy import ClusterKV
from gpu_worker.policies.infinigen.policy import InfiniGen
from gpu_worker.policies.infllm.policy import InfLLM
from gpu_worker.policies.outlier_heads.policy import OutlierHeads
from gpu_worker.policies.pqcache.policy import PQCache
from gpu_worker.policies.registry import OUTLIERS, registry
from gpu_worker.policies.snapkv.policy import SnapKV
from gpu_worker.startup.build import configured_policies


def configured(calibration: Calibration | None = None, **options: object) -> dict:
    path = calibration and calibration.path
    config = WorkerConfig(model="m", listen="unix:/w", store="unix:/s", calibration=path, **options)  # type: ignore[arg-type]
    return configured_policies(config, calibration)


def test_defaults_are_the_papers() -> None:
    assert configured() == registry()


def test_options_reach_their_policies() -> None:
    policies = configured(
        policy_options=(
            *("pqcache:num_subvectors=4", "num_bits=8", "max_iterations=9", "metric=ip"),
            *("clusterkv:tokens_per_cluster=40", "metric=l2"),
        )
    )
    assert policies["pqcache"] == PQCache(num_subvectors=4, num_bits=8, max_iterations=9, metric="ip")
    assert policies["clusterkv"] == ClusterKV(tokens_per_cluster=40, metric="l2")
    # A name with a metric has that metric, whatever the option says, and all else from the options.
    assert policies["clusterkv+ip"] == ClusterKV(tokens_per_cluster=40, metric="ip", names_metric=True)
    assert policies["pqcache+ip"] == PQCache(4, 8, max_iterations=9, metric="ip", names_metric=True)


def test_any_hyper_parameter_can_be_set() -> None:
    words = ("pqcache:num_bits=5", "recent_ratio=0.25", "adakv:alpha=0.5", "infllm:per_head=on")
    policies = configured(policy_options=words)
    assert policies["pqcache"] == PQCache(num_bits=5, recent_ratio=0.25)
    assert policies["pqcache+ip"] == PQCache(num_bits=5, recent_ratio=0.25, metric="ip", names_metric=True)
    assert policies["snapkv+adakv"] == AdaKV(SnapKV(), alpha=0.5)
    assert policies["infllm+sparse"] == InfLLM(per_head=True, sparse_prefill=True)
    with pytest.raises(
        ConfigError, match=r"--policy-options: quest has no option 'pages'; it has: page_size \(1"
    ):
        configured(policy_options=("quest:pages=4",))
    with pytest.raises(ConfigError, match="--policy-options: 'num_bits=5': give NAME:FIELD=VALUE"):
        configured(policy_options=("num_bits=5",))


def test_a_calibration_adds_outlier_heads_and_gives_the_skew() -> None:
    scores = torch.tensor([[0.1, 0.9], [0.2, 0.3], [0.8, 0.0]])
    calibration = Calibration("/file", "m", ModelFacts("llama", 3, 6, 2, 16, 48, 97), scores)
    policies = configured(calibration, policy_options=("chelsea+outliers:share=0.34",), full_layers=1)
    assert policies["chelsea+outliers"] == OutlierHeads(Chelsea(), frozenset({(1, 0)}), 2, 0.34)
    assert policies["infinigen"] == InfiniGen(skew_path="/file")
    assert set(policies) == {*registry(), OUTLIERS}
    policies = configured(
        calibration, policy_options=("chelsea:r_init=0.45", "alpha=0.05", "infinigen:ratio=0.4")
    )
    assert policies["chelsea+outliers"].inner == policies["chelsea"] == Chelsea(r_init=0.45, alpha=0.05)
    assert policies["infinigen"] == InfiniGen(ratio=0.4, skew_path="/file")
