"""The families of models that a worker serves, known before anything with tensors is loaded."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

# by `model_type` of config.json; the worker's table of families has the same
MODEL_TYPES = (
    "arcee",
    "cohere",
    "ernie4_5",
    "exaone4",
    "gemma",
    "glm",
    "glm4",
    "granite",
    "helium",
    "hunyuan_v1_dense",
    "internlm3",
    "iquestcoder",
    "jais2",
    "llama",
    "ministral3",
    "mistral",
    "mistral3",
    "nemotron",
    "olmo",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen2_5_vl",
    "qwen3",
    "qwen3_vl",
    "seed_oss",
    "smollm3",
    "stablelm",
    "starcoder2",
)
# names of classes that have a decoder and no head that writes text
_OTHER_TASKS = re.compile(r"(Classification|QuestionAnswering|RewardModel|(?<!LMHead)Model)$")


class ModelTypeError(Exception):
    """A model of a family or a task that is not served."""


def check_model_type(
    where: str, fields: Mapping[str, object], supported: Collection[str] = MODEL_TYPES
) -> None:
    """Raise ModelTypeError for a config.json of another family, or of a model that writes no text.

    Values of other types are left to the check of all fields.
    """
    model_type, architectures = fields.get("model_type"), fields.get("architectures")
    if isinstance(model_type, str) and model_type not in supported:
        known = ", ".join(sorted(supported))
        raise ModelTypeError(f"{where}: model_type {model_type!r} is not supported; supported: {known}")
    names = [str(name) for name in architectures] if isinstance(architectures, list) else []
    if names and all(_OTHER_TASKS.search(name) for name in names):
        raise ModelTypeError(
            f"{where}: field 'architectures' is {names}; expected a model that writes text, such as one ...ForCausalLM"
        )
