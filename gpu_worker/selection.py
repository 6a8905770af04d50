"""The worker's options of which tokens are attended: policies, their budget and hyper-parameters."""

from __future__ import annotations

from dataclasses import dataclass, replace

from carrel.process.options import option, share_or_tokens
from gpu_worker.errors import ConfigError
from gpu_worker.policies.hyper_parameters import read_options
from gpu_worker.policies.registry import LONG, check_allowed, check_name, option_names
from gpu_worker.records import Budget

# Tokens that the server's own budget is at least, where it is a share: a tenth of a short chat is next to nothing.
LEAST_BUDGET = 512


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
    full_layers: int = option(
        0, "first layers that attend to everything, whatever the policy", metavar="N", ge=0, le=4096
    )
    calibration: str | None = option(
        None,
        "file of carrel calibrate: outlier heads for chelsea+outliers, InfiniGen's skew",
        metavar="FILE",
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
            read_options(self.policy_options, option_names(self.is_calibrated))
        except ValueError as exc:
            raise ConfigError(f"--policy-options: {exc}") from exc

    @property
    def is_calibrated(self) -> bool:
        """Return whether requests may name policies that need a file of `carrel calibrate`."""
        return self.calibration is not None

    @property
    def default_policy(self) -> str:
        """The policy of requests that name none; maybe `auto`."""
        return self.policy or LONG

    @property
    def default_budget(self) -> Budget:
        """The budget of requests that name none."""
        return replace(self.budget, least=LEAST_BUDGET)
