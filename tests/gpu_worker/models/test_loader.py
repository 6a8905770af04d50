from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from dense_forward import dense_forward
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from tiny_models import CONFIGS, VOCAB_SIZE, random_token_ids, save_model

from carrel.process.model_types import MODEL_TYPES
from gpu_worker.errors import ModelError
from gpu_worker.models import LoadedModel, load_model
from gpu_worker.models.families import FAMILIES

DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    save_model(CONFIGS["llama-group1"](), directory)
    return directory


@pytest.fixture
def directory(pristine: Path, tmp_path: Path) -> Path:
    """A good model that a test may spoil."""
    return Path(shutil.copytree(pristine, tmp_path / "model"))


def load(directory: Path | str, **options: object) -> LoadedModel:
    return load_model(str(directory), device="cpu", dtype=torch.float32, **options)


def refusal(directory: Path | str, **options: object) -> str:
    with pytest.raises(ModelError) as caught:
        load(directory, **options)
    return str(caught.value)


def edit_json(path: Path, **changes: object) -> None:
    values = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**values, **changes}))


def split_into_shards(directory: Path) -> list[str]:
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names, weight_map = sorted(tensors), {}
    for i in range(3):
        shard = f"model-{i + 1:05d}-of-00003.safetensors"
        save_file({name: tensors[name] for name in names[i::3]}, directory / shard)
        weight_map.update(dict.fromkeys(names[i::3], shard))
    edit_json(directory / "model.safetensors.index.json", metadata={}, weight_map=weight_map)
    return names


def rewrite(directory: Path, **changes: torch.Tensor | None) -> None:
    """Replace, add or (None) drop tensors; `__` in a keyword stands for a dot."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor
    save_file(tensors, path)


def test_reports_progress_parameters_and_source(directory: Path) -> None:
    calls: list[tuple[int, int]] = []
    loaded = load(directory, progress=lambda done, total: calls.append((done, total)))
    tensors = load_file(directory / "model.safetensors")
    assert calls == [(done, len(tensors)) for done in range(1, len(tensors) + 1)]
    assert loaded.num_parameters == sum(tensor.numel() for tensor in tensors.values())
    assert loaded.source == str(directory)
    assert not any(parameter.requires_grad for parameter in loaded.decoder.parameters())


def test_shards_load_like_one_file(directory: Path, pristine: Path) -> None:
    split_into_shards(directory)
    token_ids = random_token_ids(20)
    assert torch.equal(
        dense_forward(load(directory).decoder, token_ids), dense_forward(load(pristine).decoder, token_ids)
    )


def test_a_tied_head_counts_once(tmp_path: Path) -> None:
    save_model(CONFIGS["qwen2-tied"](), tmp_path)
    loaded = load(tmp_path)
    assert loaded.decoder.head is loaded.decoder.embedding
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    assert loaded.num_parameters == sum(tensor.numel() for tensor in tensors.values())


def test_needless_tensors_are_ignored(directory: Path) -> None:
    before = load(directory).num_parameters
    rewrite(directory, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4))
    assert load(directory).num_parameters == before


@pytest.mark.parametrize("load_format", ["safetensors", "dummy"])
def test_missing_config(directory: Path, load_format: str) -> None:
    (directory / "config.json").unlink()
    assert "config.json is missing" in refusal(directory, load_format=load_format)


@pytest.mark.parametrize("text", ["{", "[1]", '"llama"', "[" * 100_000, "\ufeff\x00"])
def test_config_that_is_no_json_object(directory: Path, text: str) -> None:
    (directory / "config.json").write_text(text)
    assert "config.json" in refusal(directory)


def test_unknown_model_type_lists_the_known(directory: Path) -> None:
    edit_json(directory / "config.json", model_type="mamba")
    message = refusal(directory)
    assert "'mamba'" in message
    assert ", ".join(sorted(FAMILIES)) in message


def test_the_types_that_are_known_without_tensors_are_those_of_the_families() -> None:
    assert list(MODEL_TYPES) == sorted(FAMILIES)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", 7),
        ("hidden_size", 0),
        ("hidden_size", True),
        ("hidden_size", 10**30),
        ("num_hidden_layers", 1.5),
        ("num_key_value_heads", 7),
        ("head_dim", 7),
        ("rms_norm_eps", float("nan")),
        ("tie_word_embeddings", "yes"),
        ("attention_bias", 1),
        ("hidden_act", "gelu"),
        ("eos_token_id", VOCAB_SIZE),
        ("eos_token_id", [1, "2"]),
        ("architectures", ["LlamaForSequenceClassification"]),
        ("architectures", ["LlamaModel"]),
        ("architectures", "LlamaForCausalLM"),
        ("rope_parameters", "default"),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}),
    ],
)
def test_config_values_are_checked_by_name(directory: Path, field: str, value: object) -> None:
    edit_json(directory / "config.json", **{field: value})
    message = refusal(directory)
    assert field in message
    assert "config.json" in message


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}, "'short_factor'"),
        ({"type": "su"}, "'short_factor'"),
        ({"type": "proportional"}, "'proportional'"),
        ({"full_attention": {"rope_type": "default"}}, "differ between layers"),
        ({"rope_type": "linear", "factor": 0.5}, "'factor'"),
        ({"rope_type": "linear", "factor": float("inf")}, "'factor'"),
        ({"rope_type": "default", "rope_theta": -1}, "'rope_theta'"),
        ({"rope_type": "default", "partial_rotary_factor": 0.01}, "partial_rotary_factor"),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
            "'high_freq_factor'",
        ),
    ],
)
def test_rope_settings_are_checked(directory: Path, settings: dict[str, object], named: str) -> None:
    edit_json(directory / "config.json", rope_parameters=settings)
    assert named in refusal(directory)


def test_old_and_new_rope_settings_mean_the_same(directory: Path) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 32
    edit_json(
        directory / "config.json",
        rope_parameters={**scaling, "rope_type": "llama3", "rope_theta": 5e5},
    )
    new = load(directory, load_format="dummy").config.layers[0].attention.rope
    edit_json(
        directory / "config.json",
        rope_parameters=None,
        rope_scaling={**scaling, "type": "llama3"},
        rope_theta=5e5,
    )
    assert load(directory, load_format="dummy").config.layers[0].attention.rope == new
    assert new.theta == 5e5


def test_pickled_weights_are_refused(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    message = refusal(directory)
    assert "pickled" in message
    assert "save_pretrained" in message


def test_no_weights_at_all(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    assert "no .safetensors file" in refusal(directory)


def test_several_files_without_index(directory: Path) -> None:
    split_into_shards(directory)
    (directory / "model.safetensors.index.json").unlink()
    assert "model.safetensors.index.json" in refusal(directory)


def test_missing_shard_is_named(directory: Path) -> None:
    split_into_shards(directory)
    (directory / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of-00003.safetensors" in refusal(directory)


def test_shard_without_a_promised_tensor(directory: Path) -> None:
    names = split_into_shards(directory)
    shard = directory / "model-00001-of-00003.safetensors"
    tensors = load_file(shard)
    del tensors[names[0]]
    save_file(tensors, shard)
    message = refusal(directory)
    assert names[0] in message
    assert shard.name in message


@pytest.mark.parametrize(
    "shard", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "model.bin", 3, ""]
)
def test_index_cannot_reach_outside_the_directory(directory: Path, shard: object) -> None:
    split_into_shards(directory)
    edit_json(directory / "model.safetensors.index.json", weight_map={DOWN: shard})
    assert "in the same directory" in refusal(directory)


@pytest.mark.parametrize("weight_map", [{}, None, [1]])
def test_index_without_a_map(directory: Path, weight_map: object) -> None:
    split_into_shards(directory)
    edit_json(directory / "model.safetensors.index.json", weight_map=weight_map)
    assert "weight_map" in refusal(directory)


@pytest.mark.parametrize("kept", [0, 4, 8, 200, -1000])
def test_truncated_file(directory: Path, kept: int) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    message = refusal(directory)
    assert "truncated" in message
    assert str(path) in message


def test_corrupt_header(directory: Path) -> None:
    path = directory / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[:8] = b"\xff" * 8
    path.write_bytes(content)
    assert "truncated or no safetensors file" in refusal(directory)


def test_missing_tensor_is_named(directory: Path) -> None:
    rewrite(directory, **{DOWN.replace(".", "__"): None})
    assert DOWN in refusal(directory)


def test_unexpected_tensor_is_named(directory: Path) -> None:
    rewrite(directory, model__layers__0__self_attn__q_proj__bias=torch.zeros(48))
    assert "model.layers.0.self_attn.q_proj.bias" in refusal(directory)


def test_wrong_shape_is_named_before_memory_is_taken(directory: Path) -> None:
    # would be half a terabyte
    edit_json(directory / "config.json", intermediate_size=1 << 20, hidden_size=1 << 17)
    message = refusal(directory)
    assert "shape" in message
    assert "config.json asks for" in message


def test_quantised_tensor_is_refused(directory: Path) -> None:
    rewrite(directory, **{DOWN.replace(".", "__"): torch.zeros(48, 80, dtype=torch.int8)})
    message = refusal(directory)
    assert DOWN in message
    assert "I8" in message


def test_quantised_tensors_of_another_format_are_refused_by_its_name(directory: Path) -> None:
    edit_json(directory / "config.json", quantization_config={"quant_method": "aqlm"})
    codes = torch.zeros(4, 80, dtype=torch.int16)
    rewrite(directory, **{DOWN.removesuffix("weight").replace(".", "__") + "codes": codes})
    message = refusal(directory)
    assert "the weights are quantised by 'aqlm'" in message
    assert "down_proj.codes is of type I16" in message


def test_plain_weights_are_served_whatever_quantisation_is_left_in_the_config(
    directory: Path, pristine: Path
) -> None:
    edit_json(directory / "config.json", quantization_config={"quant_method": "awq", "bits": 4})
    token_ids = random_token_ids(20)
    assert torch.equal(
        dense_forward(load(directory).decoder, token_ids), dense_forward(load(pristine).decoder, token_ids)
    )


@pytest.mark.parametrize(
    "names", [["LlamaForCausalLM"], ["FineTune"], ["LlamaModel", "LlamaForCausalLM"], []]
)
def test_architectures_that_write_text_are_served(names: list[str], directory: Path) -> None:
    edit_json(directory / "config.json", architectures=names)
    assert load(directory).config.model_type == "llama"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e38])
@pytest.mark.parametrize("name", [DOWN, "model.layers.0.input_layernorm.weight", "lm_head.weight"])
def test_weights_that_are_not_finite_are_refused_by_name(name: str, value: float, directory: Path) -> None:
    tensor = load_file(directory / "model.safetensors")[name]
    tensor.view(-1)[-1] = value
    rewrite(directory, **{name.replace(".", "__"): tensor})
    with pytest.raises(ModelError, match=f"{name} has values that are not finite in float16"):
        load_model(str(directory), device="cpu", dtype=torch.float16)


def test_large_weights_are_served(directory: Path) -> None:
    tensor = torch.full_like(load_file(directory / "model.safetensors")[DOWN], 3e38)
    rewrite(directory, **{DOWN.replace(".", "__"): tensor})
    load(directory)


def test_end_of_sequence_ids_of_both_files(directory: Path) -> None:
    edit_json(directory / "config.json", eos_token_id=[2, 3])
    edit_json(directory / "generation_config.json", eos_token_id=[7, 2])
    assert load(directory).config.eos_token_ids == (7, 2, 3)
    (directory / "generation_config.json").unlink()
    edit_json(directory / "config.json", eos_token_id=None)
    assert load(directory).config.eos_token_ids == ()


def test_dummy_needs_only_the_config_and_is_repeatable(directory: Path) -> None:
    real = load(directory)
    (directory / "model.safetensors").unlink()
    calls: list[tuple[int, int]] = []
    first = load(directory, load_format="dummy", progress=lambda done, total: calls.append((done, total)))
    second = load(directory, load_format="dummy")
    assert first.num_parameters == real.num_parameters
    assert calls[-1][0] == calls[-1][1] == len(calls)
    token_ids = random_token_ids(10)
    logits = dense_forward(first.decoder, token_ids)
    assert torch.equal(logits, dense_forward(second.decoder, token_ids))
    assert logits.isfinite().all()
    assert logits.std() > 0
    shapes = load_model(str(directory), device="meta", dtype=None, load_format="dummy")
    assert shapes.num_parameters == real.num_parameters
    assert all(each.is_meta for each in shapes.decoder.parameters())


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_checkpoint_may_choose_the_dtype(directory: Path, field: str, dtype: torch.dtype) -> None:
    edit_json(directory / "config.json", **{"dtype": None, field: str(dtype).removeprefix("torch.")})
    assert load_model(str(directory), device="cpu", dtype=None).decoder.dtype == dtype
    edit_json(directory / "config.json", **{field: "int4"})
    with pytest.raises(ModelError, match="'int4'"):
        load_model(str(directory), device="cpu", dtype=None)


def test_unknown_load_format(directory: Path) -> None:
    assert "dummy, safetensors" in refusal(directory, load_format="gguf")


def test_out_of_memory_is_a_model_error(directory: Path) -> None:
    edit_json(directory / "config.json", vocab_size=1 << 24, hidden_size=1 << 17, head_dim=4)
    assert "no memory for the weights" in refusal(directory, load_format="dummy")


def test_a_path_that_is_no_model(tmp_path: Path) -> None:
    assert "is no directory" in refusal(tmp_path / "absent")
    (tmp_path / "file").write_text("")
    assert "is no GGUF file" in refusal(tmp_path / "file")
    assert "config.json is missing" in refusal(tmp_path)


def test_hub_id_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    message = refusal("carrel-tests/absent", download_dir=str(tmp_path), revision="v9")
    assert "'carrel-tests/absent'" in message
    assert "'v9'" in message
    assert "HF_HUB_OFFLINE" in message


def test_hub_id_from_the_cache(pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    commit = "0123456789" * 4
    repo = tmp_path / "models--carrel-tests--tiny"
    snapshot = Path(shutil.copytree(pristine, repo / "snapshots" / commit))
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    assert load("carrel-tests/tiny", download_dir=str(tmp_path)).source == str(snapshot)
