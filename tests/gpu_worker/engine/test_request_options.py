"""Requests of one policy split their budgets by options of their own."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engine_rig import Rig, request, small_policies

from gpu_worker.errors import RequestError
from gpu_worker.records import GenerationRequest


def asked(name: str, policy: str = "pqcache", **options: str) -> GenerationRequest:
    made = request(name, policy, 64, prompt=160, max_tokens=16)
    return replace(made, policy_options=tuple(options.items()))


def test_one_batch_has_requests_with_and_without_options() -> None:
    rig = Rig(policies=small_policies())
    rig.run(asked("plain"), asked("options", num_sink="8", recent_ratio="0.1"))
    plain, other = (rig.records[name] for name in ("plain", "options"))
    given = small_policies()
    changed = replace(given["pqcache"], num_sink=8, recent_ratio=0.1)  # type: ignore[type-var]
    alone = Rig(policies={**given, "pqcache": changed})
    assert other.tokens == alone.tokens(asked("alone"))
    assert plain.tokens == Rig(policies=given).tokens(asked("alone"))
    assert plain.tokens != other.tokens
    rig.check_empty()


@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        (
            "pqcache",
            {"num_bits": "4"},
            "pqcache has no option 'num_bits' of a request; it has: num_sink (0 to",
        ),
        ("pqcache", {"recent_ratio": "2"}, "recent_ratio=2: give 0 to 1"),
        ("full", {"num_sink": "4"}, "full has no option 'num_sink' of a request; it has: none"),
        ("auto", {"num_sink": "4"}, "The policy auto has no options"),
    ],
)
def test_what_a_request_may_not_set_is_refused(policy: str, options: dict[str, str], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        Rig(policies=small_policies()).run(asked("a", policy, **options))
    assert message in str(caught.value)
    assert caught.value.param == "carrel.options"
