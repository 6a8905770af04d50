"""Test which answers `make compose-test` accepts; the containers themselves need an engine."""

from __future__ import annotations

import pytest
import yaml

from kv_store.config import parse_config as parse_store
from tools.compose.asking import check_answer
from tools.compose.deployment import EPOCH, ROOT, SERVICES, CheckFailed


@pytest.mark.parametrize(
    ("answer", "policy", "offloaded", "moved"),
    [
        ("48214", "bitkeys", 8094, 1),
        ("48213", "full", 8094, 1),
        ("48213", "bitkeys", 0, 1),
        ("48213", "bitkeys", 8094, 0),
    ],
)
def test_an_answer_must_be_right_and_recalled(answer: str, policy: str, offloaded: int, moved: int) -> None:
    with pytest.raises(CheckFailed):
        check_answer("REST", answer, policy, offloaded, moved)


def test_it_asks_the_containers_that_compose_starts() -> None:
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    assert {name for name, service in services.items() if "cpu" in service["profiles"]} == set(SERVICES)
    store = parse_store(services["kv-store"]["command"])
    # the store puts its arena's socket beside the one it listens at
    assert f'"{store.listen.removeprefix("unix:").rsplit("/", 1)[0]}/arena.sock"' in EPOCH
