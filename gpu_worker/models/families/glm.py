"""GLM-4: half of each head rotates, in interleaved pairs; `glm4` adds a norm after each block.

`glm` is GLM-4-9B (2024) in its transformers form, `glm4` the GLM-4-0414 line.
"""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.models.config import ModelConfig
from gpu_worker.models.config_fields import ConfigFields
from gpu_worker.models.families.base import Family, read_common


def read_glm(fields: ConfigFields) -> ModelConfig:
    return replace(
        read_common(fields, interleaved=True, partial_rotary_factor=0.5),
        qkv_bias=fields.flag("attention_bias", default=True),
        fused_gate_up=True,
    )


def read_glm4(fields: ConfigFields) -> ModelConfig:
    return replace(read_glm(fields), post_norms=True)


GLM = Family("glm", read_glm)
GLM4 = Family("glm4", read_glm4)
