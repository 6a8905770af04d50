"""A GGUF file is the model that it was made of, and what cannot be served is refused in words."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from dense_forward import dense_forward
from gguf import GGMLQuantizationType as Kind
from gguf_model import write_gguf
from tiny_models import CONFIGS, make_model, random_token_ids, rival_logits
from transformers import AutoModelForCausalLM, PreTrainedConfig

from gpu_worker.errors import ModelError
from gpu_worker.models import LoadedModel, load_model

ROOT = Path(__file__).parents[3]
SMOLLM2 = ROOT / "models" / "smollm2.gguf"
# rows that are whole blocks of every quantised type
SIZES = {"hidden_size": 96, "intermediate_size": 64}

FILES: dict[str, tuple[str, Kind, dict[str, object]]] = {
    "llama-factors-tied": ("llama-3-group4-tied", Kind.Q8_0, {"head_dim": 32}),
    "llama-biases-linear": ("llama-linear-biases", Kind.F16, {}),
    "mistral-window": ("mistral", Kind.Q4_0, {"sliding_window": 48}),
    "qwen2-yarn": ("qwen2-yarn", Kind.Q4_1, {}),
    "qwen3": ("qwen3", Kind.BF16, {}),
    "phi3": ("phi3", Kind.Q8_0, {}),
    "phi4-longrope": (
        "phi3-4-mini",
        Kind.F16,
        {"num_attention_heads": 6, "original_max_position_embeddings": 64},
    ),
    "granite": ("granite-tied-biases", Kind.Q8_0, {}),
    "seed_oss": ("seed_oss", Kind.Q8_0, {}),
    "seed_oss-biases": ("seed_oss-biases", Kind.F16, {}),
    "ernie4_5": ("ernie4_5", Kind.F16, {}),
    "glm4": ("glm4", Kind.F32, {}),
    "mistral3": ("ministral3", Kind.F16, {}),
    "smollm3": (
        "smollm3-untied",
        Kind.F16,
        {"num_hidden_layers": 4, "no_rope_layers": None, "layer_types": None},
    ),
    "arcee": ("arcee", Kind.F16, {}),
    "olmo2": ("olmo2", Kind.F16, {}),
    "exaone4": ("exaone4", Kind.Q8_0, {}),
    "hunyuan-dense": ("hunyuan_v1_dense-alpha", Kind.F16, {}),
}


def config_of(name: str, **changes: object) -> PreTrainedConfig:
    config = CONFIGS[name]()
    return type(config)(**config.to_dict() | SIZES | changes)


def load(path: Path, dtype: torch.dtype | None = torch.float32, **options: object) -> LoadedModel:
    return load_model(str(path), device="cpu", dtype=dtype, **options)


@pytest.mark.parametrize("name", FILES)
def test_logits_equal_those_of_the_model_it_was_made_of(name: str, tmp_path: Path) -> None:
    base, kind, changes = FILES[name]
    rival = make_model(config_of(base, **changes))
    loaded = load(write_gguf(rival, tmp_path / "m.gguf", kind))
    token_ids = random_token_ids(loaded.config.max_model_len)
    expected = rival_logits(rival, token_ids)
    assert expected.std() > 0.2
    torch.testing.assert_close(dense_forward(loaded.decoder, token_ids), expected, atol=1e-4, rtol=0)
    rival.save_pretrained(tmp_path / "m")
    same = load(tmp_path / "m").config
    for field in ("max_model_len", "tie_word_embeddings", "eos_token_ids", "model_type", "head_dim"):
        assert getattr(loaded.config, field) == getattr(same, field), field
    assert loaded.source == str(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("name", "arch"),
    [("mistral", "llama"), ("mistral", "mistral"), ("qwen2-tied", "qwen2vl"), ("qwen3", "qwen3vl")],
)
def test_a_family_with_two_names_of_its_architecture(name: str, arch: str, tmp_path: Path) -> None:
    rival = make_model(config_of(name))
    loaded = load(write_gguf(rival, tmp_path / "m.gguf", arch=arch))
    token_ids = random_token_ids(20)
    torch.testing.assert_close(
        dense_forward(loaded.decoder, token_ids), rival_logits(rival, token_ids), atol=1e-4, rtol=0
    )


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    return write_gguf(make_model(config_of("qwen3")), folder / "m.gguf", Kind.Q8_0)


def test_the_type_to_compute_in_and_random_weights(pristine: Path, tmp_path: Path) -> None:
    assert load(pristine, dtype=None).decoder.dtype == torch.bfloat16
    half = write_gguf(make_model(config_of("qwen3")), tmp_path / "m.gguf", Kind.F16)
    assert load(half, dtype=None).decoder.dtype == torch.float16
    dummy, real = load(pristine, load_format="dummy"), load(pristine)
    assert dummy.num_parameters == real.num_parameters
    assert not torch.equal(dummy.decoder.embedding.weight, real.decoder.embedding.weight)


def test_every_token_that_may_end_an_answer(tmp_path: Path) -> None:
    texts = ["a", "b", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eot_id|>"]
    path = write_gguf(
        make_model(config_of("qwen3")), tmp_path / "m.gguf", tokenizer__ggml__eos_token_id=4,
        tokenizer__ggml__eot_token_id=1, tokenizer__ggml__tokens=texts,
        tokenizer__ggml__token_type=[1, 1, 3, 3, 3, 1],
    )  # fmt: skip
    assert load(path).config.eos_token_ids == (4, 1, 2)


REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "architecture": ({"arch": "gemma3"}, "'gemma3' is not supported; supported: llama, mistral, mistral3, qwen2,"),
    "experts": ({"qwen3__expert_count": 8}, "mixture of 8 experts"),
    "split": ({"split__count": 3}, "one of 3 parts of a model; join them"),
    "rope scaling": ({"qwen3__rope__scaling__type": "su4"}, "'su4'; expected one of"),
    "temperature": (
        {"qwen3__rope__scaling__type": "linear", "qwen3__rope__scaling__attn_factor": 0.5},
        "attn_factor is 0.5",
    ),
    "partial rotation": ({"qwen3__rope__dimension_count": 8}, "RoPE turns 8 elements of a head of 16"),
    "rope with axes": (
        {"arch": "glm4", "glm4__rope__dimension_sections": [8, 12, 12, 0]},
        "RoPE with axes is not supported for 'glm4'",
    ),
    "heads by layer": ({"qwen3__attention__head_count_kv": [2, 1]}, "'qwen3.attention.head_count_kv' is [2, 1]"),
    "no layers": ({"qwen3__block_count": None}, "'qwen3.block_count' is missing"),
    "another shape": ({"qwen3__feed_forward_length": 128}, "the metadata asks for [128, 96]"),
    "more layers": ({"qwen3__block_count": 3}, "the weights lack model.layers.2."),
    "fewer layers": ({"qwen3__block_count": 1}, "which this model_type lacks"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused(name: str, tmp_path: Path) -> None:
    changes, message = REFUSED[name]
    changes = {"arch": "qwen3"} | changes
    with pytest.raises(ModelError) as caught:
        load(write_gguf(make_model(config_of("qwen3")), tmp_path / "m.gguf", **changes))
    assert message in str(caught.value)
    assert "m.gguf" in str(caught.value)


def test_a_type_that_cannot_be_dequantised_is_refused(tmp_path: Path, pristine: Path) -> None:
    content = pristine.read_bytes()
    place = next(t for t in gguf.GGUFReader(pristine).tensors if t.name == "blk.0.attn_q.weight").field.offset
    # the type follows name, number of dimensions and both dimensions
    at = place + 8 + len("blk.0.attn_q.weight") + 4 + 16
    assert content[at] == Kind.Q8_0
    for number in (Kind.Q8_K, 200):
        path = tmp_path / "m.gguf"
        path.write_bytes(content[:at] + np.uint32(number).tobytes() + content[at + 4 :])
        with pytest.raises(
            ModelError, match=rf"blk\.0\.attn_q\.weight is of ggml type {int(number)}, .* Q8_0"
        ):
            load(path)


def test_damaged_files_are_refused(tmp_path: Path, pristine: Path) -> None:
    content = pristine.read_bytes()
    path = tmp_path / "m.gguf"
    for cut in (4, 6, 20, 100, 700, len(content) // 2, len(content) - 64):
        path.write_bytes(content[:cut])
        with pytest.raises(ModelError, match="truncated"):
            load(path)
    for spoiled, message in (
        (b"", "is no GGUF file"),
        (b"PK" + content[2:], "is no GGUF file"),
        (content[:4] + b"\x01\0\0\0" + content[8:], "is of GGUF version 1"),
        (content[:4] + b"\0\0\0\x03" + content[8:], "big-endian"),
        # a million tensors, or values
        (content[:8] + b"\xff\xff\xff\0" + content[12:], "truncated or damaged"),
        (content[:16] + b"\xff\xff\xff\0" + content[20:], "truncated or damaged"),
    ):
        path.write_bytes(spoiled)
        with pytest.raises(ModelError, match=message):
            load(path)


def smollm2_needs(*packages: str) -> Callable[[object], object]:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    reason = (
        f"{SMOLLM2} is not here (`make models/smollm2.gguf`)" if not SMOLLM2.exists() else f"no {missing}"
    )
    return pytest.mark.skipif(not SMOLLM2.exists() or bool(missing), reason=reason)


@smollm2_needs("accelerate")
def test_smollm2_equals_transformers_on_the_same_file(tmp_path: Path) -> None:
    shutil.copy(SMOLLM2, tmp_path / "m.gguf")
    rival = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32).eval()
    loaded = load(SMOLLM2)
    token_ids = torch.randint(0, 49152, (64,), generator=torch.Generator().manual_seed(0))
    ours, expected = dense_forward(loaded.decoder, token_ids), rival_logits(rival, token_ids)
    torch.testing.assert_close(ours, expected, atol=1e-5 * float(expected.abs().max()), rtol=0)
    assert torch.equal(ours.argmax(-1), expected.argmax(-1))
