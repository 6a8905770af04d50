"""The end of an error about a policy that is not there."""

from __future__ import annotations

import pytest

from carrel.process.policy_names import choices
from carrel.process.request_limits import LimitError, check_request
from gpu_worker.v1 import gpu_worker_pb2 as pb


@pytest.mark.parametrize(
    ("asked", "known", "text"),
    [
        ("nothing", ("full", "snapkv", "snapkv+adakv"), "choose one of full, snapkv"),
        (
            "snapkv+adakw",
            ("full", "snapkv", "snapkv+adakv"),
            "choose one of full, snapkv; did you mean snapkv+adakv?",
        ),
        # a form whose method is not served is the only way to name it
        ("nothing", ("full", "h2o+adakv"), "choose one of full, h2o+adakv"),
    ],
)
def test_plain_names_are_listed_and_the_nearest_is_named(
    asked: str, known: tuple[str, ...], text: str
) -> None:
    assert choices(asked, known) == text


def test_a_request_with_an_unknown_policy_gets_them() -> None:
    info = pb.GetInfoResponse(policies=["full", "snapkv", "snapkv+adakv"])
    with pytest.raises(
        LimitError, match=r"no policy 'snap': choose one of full, snapkv; did you mean snapkv\?$"
    ):
        check_request(pb.GenerateRequest(policy="snap"), info)
