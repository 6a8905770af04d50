"""Model families by `model_type`: each reads its config.json. To add one: a file in this folder, and a line here."""

from __future__ import annotations

from collections.abc import Callable

from gpu_worker.models.config import ModelConfig
from gpu_worker.models.config_fields import ConfigFields
from gpu_worker.models.glm import read_glm, read_glm4
from gpu_worker.models.granite import read_granite
from gpu_worker.models.llama import (
    read_ernie4_5,
    read_helium,
    read_internlm3,
    read_iquestcoder,
    read_llama,
    read_mistral,
)
from gpu_worker.models.phi import read_phi3
from gpu_worker.models.qwen import read_qwen2, read_qwen3
from gpu_worker.models.seed import read_seed_oss
from gpu_worker.models.wrappers import read_mistral3, read_qwen2_5_vl, read_qwen3_vl

FAMILIES: dict[str, Callable[[ConfigFields], ModelConfig]] = {
    "llama": read_llama,
    "mistral": read_mistral,
    "internlm3": read_internlm3,
    "iquestcoder": read_iquestcoder,
    "ernie4_5": read_ernie4_5,
    "helium": read_helium,
    "qwen2": read_qwen2,
    "qwen3": read_qwen3,
    "glm": read_glm,
    "glm4": read_glm4,
    "phi3": read_phi3,
    "granite": read_granite,
    "seed_oss": read_seed_oss,
    "mistral3": read_mistral3,
    "qwen2_5_vl": read_qwen2_5_vl,
    "qwen3_vl": read_qwen3_vl,
}
