"""Model families by `model_type`. To add one: a file that reads its config.json, and a line here."""

from __future__ import annotations

from gpu_worker.models.families.base import Family
from gpu_worker.models.families.glm import GLM, GLM4
from gpu_worker.models.families.llama import LLAMA
from gpu_worker.models.families.mistral import MISTRAL
from gpu_worker.models.families.qwen2 import QWEN2
from gpu_worker.models.families.qwen3 import QWEN3

__all__ = ["FAMILIES", "Family"]

FAMILIES = {family.model_type: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3, GLM, GLM4)}
