"""The text of a model that also reads images: found in every layout of its files, without its vision."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from dense_forward import dense_forward
from safetensors.torch import load_file, save_file
from tiny_models import CONFIGS, random_token_ids, rival_logits, save_model

from gpu_worker.errors import ModelError
from gpu_worker.models import LoadedModel, load_model

TOKENS = random_token_ids(50)


def load(path: Path) -> LoadedModel:
    return load_model(str(path), device="cpu", dtype=torch.float32)


def rename(directory: Path, **prefixes: str) -> None:
    """Change the beginnings of names; `__` in a keyword stands for a dot."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for old, new in prefixes.items():
        start = old.replace("__", ".")
        for name in [name for name in tensors if name.startswith(start)]:
            tensors[new + name.removeprefix(start)] = tensors.pop(name)
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("name", "prefixes"),
    [
        ("mistral3", {"language_model__model__": "model.language_model.", "vision_": "model.vision_"}),
        ("mistral3-untied", {"language_model__lm_head": "lm_head"}),
        ("qwen2_5_vl", {"model__": "model.language_model.", "visual": "model.visual"}),
        ("qwen3_vl", {"model__language_model__": "language_model.model.", "model__visual": "visual"}),
    ],
)
def test_every_layout_of_the_files_is_read(name: str, prefixes: dict[str, str], tmp_path: Path) -> None:
    expected = rival_logits(save_model(CONFIGS[name](), tmp_path), TOKENS)
    before = load(tmp_path)
    rename(tmp_path, **prefixes)
    for model in (before, load(tmp_path)):
        torch.testing.assert_close(dense_forward(model.decoder, TOKENS), expected, atol=1e-4, rtol=0)
        assert model.config.model_type == name.partition("-")[0]


@pytest.mark.parametrize("position_type", ["default", "mrope"])
def test_fields_of_the_text_may_lie_at_the_top(position_type: str, tmp_path: Path) -> None:
    expected = rival_logits(save_model(CONFIGS["qwen2_5_vl"](), tmp_path), TOKENS)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    values = {**values.pop("text_config"), **values, "rope_theta": 10000.0}
    del values["rope_parameters"]
    values["rope_scaling"] = {"type": position_type, "mrope_section": [1, 1, 2]}
    path.write_text(json.dumps(values))
    torch.testing.assert_close(dense_forward(load(tmp_path).decoder, TOKENS), expected, atol=1e-4, rtol=0)


def test_other_tensors_are_still_refused(tmp_path: Path) -> None:
    save_model(CONFIGS["mistral3"](), tmp_path)
    rename(tmp_path, multi_modal_projector__norm="audio_tower.norm")
    with pytest.raises(ModelError, match=r"the weights have audio_tower\.norm\.weight, which"):
        load(tmp_path)


def test_another_text_is_refused_by_name(tmp_path: Path) -> None:
    save_model(CONFIGS["mistral3"](), tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    values["text_config"]["model_type"] = "mistral4"
    path.write_text(json.dumps(values))
    with pytest.raises(
        ModelError, match="text_config: field 'model_type' is 'mistral4'; expected one of ministral3, mistral"
    ):
        load(tmp_path)
