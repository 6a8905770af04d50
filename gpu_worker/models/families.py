"""Model families by `model_type`: each reads its config.json. To add one: a file in this folder, and a line here."""

from __future__ import annotations

from collections.abc import Callable

from gpu_worker.models.cohere import read_cohere
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.config_fields import ConfigFields
from gpu_worker.models.exaone import read_exaone4
from gpu_worker.models.gemma import read_gemma
from gpu_worker.models.glm import read_glm, read_glm4
from gpu_worker.models.granite import read_granite
from gpu_worker.models.hunyuan import read_hunyuan_v1_dense
from gpu_worker.models.llama import (
    read_ernie4_5,
    read_helium,
    read_internlm3,
    read_iquestcoder,
    read_llama,
    read_ministral3,
    read_mistral,
)
from gpu_worker.models.olmo import read_olmo, read_olmo2
from gpu_worker.models.phi import read_phi3
from gpu_worker.models.qwen import read_qwen2, read_qwen3
from gpu_worker.models.seed import read_seed_oss
from gpu_worker.models.smollm import read_smollm3
from gpu_worker.models.stablelm import read_stablelm
from gpu_worker.models.ungated import read_arcee, read_jais2, read_nemotron, read_starcoder2
from gpu_worker.models.wrappers import read_mistral3, read_qwen2_5_vl, read_qwen3_vl

FAMILIES: dict[str, Callable[[ConfigFields], ModelConfig]] = {
    "llama": read_llama,
    "mistral": read_mistral,
    "ministral3": read_ministral3,
    "mistral3": read_mistral3,
    "qwen2": read_qwen2,
    "qwen3": read_qwen3,
    "qwen2_5_vl": read_qwen2_5_vl,
    "qwen3_vl": read_qwen3_vl,
    "glm": read_glm,
    "glm4": read_glm4,
    "phi3": read_phi3,
    "granite": read_granite,
    "smollm3": read_smollm3,
    "olmo": read_olmo,
    "olmo2": read_olmo2,
    "seed_oss": read_seed_oss,
    "ernie4_5": read_ernie4_5,
    "hunyuan_v1_dense": read_hunyuan_v1_dense,
    "exaone4": read_exaone4,
    "internlm3": read_internlm3,
    "iquestcoder": read_iquestcoder,
    "helium": read_helium,
    "gemma": read_gemma,
    "cohere": read_cohere,
    "stablelm": read_stablelm,
    "starcoder2": read_starcoder2,
    "nemotron": read_nemotron,
    "arcee": read_arcee,
    "jais2": read_jais2,
}
