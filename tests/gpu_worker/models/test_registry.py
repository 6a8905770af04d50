from __future__ import annotations

import pytest

from gpu_worker.errors import ModelError
from gpu_worker.models import FAMILIES
from gpu_worker.models.registry import Registry


def test_families_are_registered() -> None:
    assert FAMILIES.names() == ("glm", "glm4", "llama", "mistral", "qwen2", "qwen3")
    assert all(FAMILIES.get(name).model_type == name for name in FAMILIES.names())


def test_duplicates_raise() -> None:
    registry: Registry[int] = Registry("number")
    registry.register("one", 1)
    with pytest.raises(ValueError, match="'one'"):
        registry.register("one", 2)
    assert registry.get("one") == 1


def test_unknown_names_list_the_valid_ones() -> None:
    registry: Registry[int] = Registry("number")
    registry.register("two", 2)
    registry.register("one", 1)
    with pytest.raises(ModelError, match="number 'six' is not supported; supported: one, two"):
        registry.get("six")
