"""The worker's options of which tokens are attended: policies, their budget and hyper-parameters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from carrel.process.options import option, share_or_tokens
from gpu_worker.errors import ConfigError
from gpu_worker.policies.hyper_parameters import read_options
from gpu_worker.policies.registry import LONG, check_allowed, check_name, option_names
from gpu_worker.records import Budget


def read_budget(text: str) -> Budget:
    """From a share in (0, 1] or a number of tokens. Raises ValueError."""
    return Budget(*share_or_tokens(text))


@dataclass(frozen=True, kw_only=True)
class SelectionOptions:
    """Which tokens are attended."""

    policy: str | None = option(
        None,
        "selection policy of requests that name none, or auto: full for short ones, else the default "
        "(default: bitkeys)",
        also=("kv-policy",),
        metavar="NAME",
    )
    allowed_policies: tuple[str, ...] = option(
        (),
        "policies that requests may name; auto only beside full and bitkeys, of which it chooses (default: all)",
        metavar="NAME",
    )
    policy_options: tuple[str, ...] = option(
        (),
        "hyper-parameters of policies; carrel methods has them, and what they may be",
        metavar="NAME:FIELD=VALUE",
    )
    budget: Budget = option(
        "0.1",
        "tokens attended per KV head and step: a share of the prompt in (0, 1] or a number from 2 up",
        parse=read_budget,
        metavar="SHARE|N",
    )
    least_budget: int = option(
        512,
        "tokens that --budget is at least, where it is a share; shares that requests name are taken as they are",
        metavar="N",
        ge=0,
        le=1 << 20,
    )
    full_layers: int = option(
        0, "first layers that attend to everything, whatever the policy", metavar="N", ge=0, le=4096
    )
    granularity: Literal["kv_head", "q_head"] = option(
        "kv_head",
        "select for each kv_head, or each q_head as some papers do, at a group times the KV cache",
        metavar="NAME",
    )
    calibration: str | None = option(
        None,
        "file of carrel calibrate: outlier heads for the policies +outliers, InfiniGen's skew",
        metavar="FILE",
    )
    outlier_share: float = option(
        0.04, "of all KV heads, what the policies +outliers keep whole", metavar="SHARE", ge=0, le=1
    )
    pq_num_subvectors: int = option(
        2, "PQ: parts that a key is split into", name="pq-subvectors", metavar="N", ge=1, le=64
    )
    pq_nbits: int = option(6, "PQ: bits of a code, one per part", name="pq-bits", metavar="N", ge=1, le=8)
    pq_iterations: int = option(
        0, "PQ: K-means iterations; 0: the store's adaptive bound", metavar="N", ge=0, le=1000
    )
    pq_metric: Literal["l2", "ip"] = option("l2", "PQ: l2 or ip, of its codebooks", metavar="NAME")
    clusterkv_tokens_per_cluster: int = option(
        80, "ClusterKV: mean cluster size", metavar="N", ge=2, le=2**16
    )
    clusterkv_metric: Literal["cosine", "l2", "ip"] = option(
        "cosine", "ClusterKV: cosine, l2 or ip, of clustering", metavar="NAME"
    )

    def check_selection(self) -> None:
        """Raises ConfigError."""
        try:
            check_name(self.default_policy, self.is_calibrated)
        except ValueError as exc:
            raise ConfigError(f"--policy: {exc}") from exc
        try:
            check_allowed(self.allowed_policies, self.default_policy, self.is_calibrated)
        except ValueError as exc:
            raise ConfigError(f"--allowed-policies: {exc}") from exc
        try:
            read_options(self.policy_options, option_names())
        except ValueError as exc:
            raise ConfigError(f"--policy-options: {exc}") from exc

    @property
    def is_calibrated(self) -> bool:
        """Whether policies that need a file of `carrel calibrate` may be named."""
        return self.calibration is not None

    @property
    def default_policy(self) -> str:
        """Of requests that name none; maybe `auto`."""
        return self.policy or LONG

    @property
    def default_budget(self) -> Budget:
        """Of requests that name none."""
        return replace(self.budget, least=self.least_budget)
