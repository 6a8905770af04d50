"""A wrapper is the policy that it is around, in all that it does not define itself."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_worker.policies.adakv.policy import AdaKV
from gpu_worker.policies.base import Policy
from gpu_worker.policies.cam.policy import CaM
from gpu_worker.policies.chelsea.policy import Chelsea
from gpu_worker.policies.layerwise.policy import LayerWise
from gpu_worker.policies.outlier_heads.policy import OutlierHeads
from gpu_worker.policies.retain import Recompression, RetainPolicy

HOOKS = {name for name in dir(RetainPolicy) if not name.startswith("_")}
CASES = {
    "between heads": (AdaKV, {"name", "most_kept", "keep"}),
    "between layers": (LayerWise, {"name", "layer_budget"}),
    "outliers": (OutlierHeads, {"name", "layer_budget", "most_kept", "room", "keep"}),
}


class Everything:
    """Answers whatever it is asked for with its name."""

    evicts = False

    def __getattr__(self, name: str) -> str:
        return name


@pytest.mark.parametrize("case", CASES)
def test_what_a_wrapper_does_not_define_is_its_inner_policys(case: str) -> None:
    wrapper, own = CASES[case]
    arguments: tuple[Any, ...] = (frozenset(), 2) if wrapper is OutlierHeads else ()
    policy: Any = wrapper(Everything(), *arguments)
    found = {name for name in HOOKS if getattr(policy, name) != name}
    assert found - {"evicts"} == own | {"compress", "recompression"}
    assert policy.evicts is False


def test_what_is_asked_of_the_inner_policy_is_asked_of_the_whole_of_it() -> None:
    policy: Policy = LayerWise(CaM())
    assert policy.evicts  # type: ignore[attr-defined]
    assert policy.num_queries(policy.plan(100, 40)) == 32
    # by what the inner policy says of itself
    assert policy.window_begin(policy.plan(100, 40), 150) == CaM().window_begin(policy.plan(100, 40), 150)
    plan = LayerWise(Chelsea()).plan(100, 40)
    assert plan.has_means
    # but layers whose budgets differ are not compressed together
    assert LayerWise(Chelsea()).recompression(plan) == Recompression(128, together=False)
    assert Chelsea().recompression(plan) == Recompression(128, together=True)
