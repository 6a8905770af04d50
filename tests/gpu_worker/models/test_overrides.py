"""Fields of config.json that the caller gives other values: the model is that of a changed file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from dense_forward import dense_forward
from tiny_models import CONFIGS, random_token_ids, rival_logits, save_model
from transformers import AutoModelForCausalLM

from gpu_worker.errors import ModelError
from gpu_worker.models import LoadedModel, load_model

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
TOKENS = random_token_ids(200)


def load(directory: Path, overrides: dict[str, object]) -> LoadedModel:
    return load_model(str(directory), device="cpu", dtype=torch.float32, overrides=overrides)


def rewrite(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    "given",
    [
        {"rope_scaling": YARN},
        {"rope_parameters": {**YARN, "type": "yarn"}},
        {"rope_scaling": YARN | {"rope_theta": 5e5}},
    ],
)
@pytest.mark.parametrize("is_old", [False, True])
def test_yarn_is_that_of_a_file_which_says_it(given: dict[str, object], is_old: bool, tmp_path: Path) -> None:
    """The base stays where it is not given."""
    save_model(CONFIGS["qwen3"](), tmp_path)
    rewrite(tmp_path, max_position_embeddings=64)
    old = {"rope_parameters": None, "rope_scaling": None, "rope_theta": 3e5}
    rewrite(tmp_path, **old if is_old else {"rope_parameters": {"rope_type": "default", "rope_theta": 3e5}})
    model = load(tmp_path, given)
    assert model.config.max_model_len == 256
    settings = {"rope_theta": 3e5} | next(iter(given.values()))  # type: ignore[operator]
    rewrite(tmp_path, rope_scaling=None, rope_theta=None, rope_parameters=settings)
    rival = AutoModelForCausalLM.from_pretrained(tmp_path).eval().float()
    expected = rival_logits(rival, TOKENS)
    torch.testing.assert_close(dense_forward(model.decoder, TOKENS), expected, atol=1e-4, rtol=0)


def test_fields_of_a_text_within_are_changed_there(tmp_path: Path) -> None:
    save_model(CONFIGS["mistral3"](), tmp_path)
    for overrides in ({"max_position_embeddings": 99}, {"text_config": {"max_position_embeddings": 99}}):
        assert load(tmp_path, overrides).config.max_model_len == 99


def test_fields_of_the_whole_model_are_changed_where_they_are(tmp_path: Path) -> None:
    save_model(CONFIGS["mistral3-untied"](), tmp_path)
    for overrides, is_tied in (({}, False), ({"tie_word_embeddings": True}, True)):
        model = load_model(
            str(tmp_path), device="cpu", dtype=torch.float32, load_format="dummy", overrides=overrides
        )
        assert model.config.tie_word_embeddings is is_tied


def test_the_base_alone_may_be_changed(tmp_path: Path) -> None:
    save_model(CONFIGS["llama-linear-biases"](), tmp_path)
    rope = load(tmp_path, {"rope_theta": 77.0}).config.layers[0].attention.rope
    assert rope is not None
    assert (rope.theta, rope.rope_type, rope.factor) == (77.0, "linear", 4.0)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"max_positions": 9}, "has no field 'max_positions'; check its name"),
        ({"rope_scaling": None}, "rope_scaling is None; expected an object"),
        ({"rope_scaling": {"rope_type": "no"}}, "'rope_type' is 'no'; expected one of"),
        ({"hidden_size": 96}, "config.json asks for"),
    ],
)
def test_what_cannot_be_is_refused(overrides: dict[str, object], message: str, tmp_path: Path) -> None:
    save_model(CONFIGS["llama-group1"](), tmp_path)
    with pytest.raises(ModelError, match=message):
        load(tmp_path, overrides)
