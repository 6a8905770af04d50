from __future__ import annotations

from pathlib import Path

import pytest
import torch
from dense_forward import causal_attention, dense_forward
from tiny_models import BLOCKS, CONFIGS, MAX_POSITIONS, random_token_ids, rival_logits, save_model
from transformers import MistralConfig, Qwen2Config

from gpu_worker.models import load_model

NANO = Path(__file__).parents[3] / "models" / "carrel-nano"


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    rival = save_model(CONFIGS[name](), tmp_path)
    loaded = load_model(str(tmp_path), device="cpu", dtype=torch.float32)
    assert loaded.config.max_model_len == MAX_POSITIONS
    for length in (1, 7, 65, MAX_POSITIONS):
        token_ids = random_token_ids(length, seed=length)
        expected = rival_logits(rival, token_ids)
        assert expected.std() > 0.3
        torch.testing.assert_close(dense_forward(loaded.decoder, token_ids), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "config",
    [
        MistralConfig(**CONFIGS["mistral"]().to_dict() | {"sliding_window": 48}),
        Qwen2Config(
            **CONFIGS["qwen2-tied"]().to_dict()
            | {"use_sliding_window": True, "sliding_window": 48, "max_window_layers": 1, "layer_types": None}
        ),
    ],
    ids=["mistral", "qwen2"],
)
def test_sliding_window_caps_the_length_and_is_exact_up_to_it(config: object, tmp_path: Path) -> None:
    rival = save_model(config, tmp_path)
    loaded = load_model(str(tmp_path), device="cpu", dtype=torch.float32)
    assert loaded.config.max_model_len == 48
    token_ids = random_token_ids(64)
    ours, expected = dense_forward(loaded.decoder, token_ids[:48]), rival_logits(rival, token_ids)
    torch.testing.assert_close(ours, expected[:48], atol=1e-4, rtol=0)


def test_yarn_stretches_the_length(tmp_path: Path) -> None:
    config = Qwen2Config(**CONFIGS["qwen2-yarn"]().to_dict() | {"max_position_embeddings": 64})
    rival = save_model(config, tmp_path)
    loaded = load_model(str(tmp_path), device="cpu", dtype=torch.float32)
    assert loaded.config.max_model_len == 256
    token_ids = random_token_ids(200)
    torch.testing.assert_close(
        dense_forward(loaded.decoder, token_ids), rival_logits(rival, token_ids), atol=1e-4, rtol=0
    )


def test_the_longest_context_decides_the_factors_of_longrope(tmp_path: Path) -> None:
    """transformers chooses them for each forward pass, by its last position."""
    config = CONFIGS["phi3-4-mini"]()
    config.original_max_position_embeddings = 64
    config.rope_parameters["original_max_position_embeddings"] = 64
    rival = save_model(config, tmp_path)
    token_ids = random_token_ids(MAX_POSITIONS)
    for longest in (64, 65, None):
        loaded = load_model(str(tmp_path), device="cpu", dtype=torch.float32, max_model_len=longest)
        served = token_ids[: longest or MAX_POSITIONS]
        ours, expected = dense_forward(loaded.decoder, served), rival_logits(rival, served)
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["llama-3-group4-tied", "qwen3", "glm4", *BLOCKS])
def test_tokens_of_mixed_sequences_do_not_touch_each_other(name: str, tmp_path: Path) -> None:
    save_model(CONFIGS[name](), tmp_path)
    decoder = load_model(str(tmp_path), device="cpu", dtype=torch.float32).decoder
    config = decoder.config
    first, second = random_token_ids(9, seed=1), random_token_ids(5, seed=2)
    positions = torch.cat((torch.arange(9), torch.arange(5) + 100))
    order = torch.randperm(14, generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        hidden = decoder.embed(torch.cat((first, second)))
        mixed = decoder.project_qkv(1, hidden[order], positions[order])
        alone = [
            decoder.project_qkv(1, hidden[:9], positions[:9]),
            decoder.project_qkv(1, hidden[9:], positions[9:]),
        ]
        for got, left, right in zip(mixed, *alone, strict=True):
            torch.testing.assert_close(got, torch.cat((left, right))[order])
        queries, keys, values = mixed
        assert queries.shape == (14, config.num_heads, config.head_dim)
        assert keys.shape == values.shape == (14, config.num_kv_heads, config.head_dim)
        attention = torch.randn(14, config.num_heads, config.head_dim)
        together = decoder.finish_layer(0, hidden, attention)
        torch.testing.assert_close(decoder.finish_layer(0, hidden[3:4], attention[3:4]), together[3:4])
        assert decoder.finish_layer(0, hidden[:0], attention[:0]).shape == (0, config.hidden_size)


@pytest.mark.parametrize("name", ["qwen3", *BLOCKS])
def test_rows_are_filled_with_the_keys_and_values_that_are_returned(name: str, tmp_path: Path) -> None:
    save_model(CONFIGS[name](), tmp_path)
    decoder = load_model(str(tmp_path), device="cpu", dtype=torch.float32).decoder
    config = decoder.config
    rows = torch.full((config.num_kv_heads, 9, decoder.row_format.row_elements), float("nan"))
    with torch.inference_mode():
        hidden, positions = decoder.embed(random_token_ids(9)), torch.arange(9)
        expected = decoder.project_qkv(0, hidden, positions)
        for got, want in zip(decoder.project_qkv(0, hidden, positions, rows), expected, strict=True):
            torch.testing.assert_close(got, want)
    torch.testing.assert_close(rows.transpose(0, 1), torch.cat(expected[1:], dim=-1))


@pytest.mark.parametrize("name", ["llama-group1", "llama-linear-biases", "glm4", *BLOCKS])
def test_inputs_are_only_read(name: str, tmp_path: Path) -> None:
    save_model(CONFIGS[name](), tmp_path)
    decoder = load_model(str(tmp_path), device="cpu", dtype=torch.float32).decoder
    with torch.inference_mode():
        hidden = decoder.embed(random_token_ids(6))
        before = hidden.clone()
        queries, keys, values = decoder.project_qkv(0, hidden, torch.arange(6))
        attention = causal_attention(queries, keys, values, decoder.attention_scale)
        attention_before = attention.clone()
        decoder.finish_layer(0, hidden, attention)
        assert torch.equal(hidden, before)
        assert torch.equal(attention, attention_before)


@pytest.mark.parametrize("name", ["qwen3", "nemotron", "olmo", *BLOCKS])
def test_bf16_stays_near_float32(name: str, tmp_path: Path) -> None:
    save_model(CONFIGS[name](), tmp_path)
    exact = load_model(str(tmp_path), device="cpu", dtype=torch.float32)
    rounded = load_model(str(tmp_path), device="cpu", dtype=torch.bfloat16)
    assert rounded.decoder.dtype == torch.bfloat16
    token_ids = random_token_ids(150)
    expected, got = dense_forward(exact.decoder, token_ids), dense_forward(rounded.decoder, token_ids)
    assert got.dtype == torch.float32
    error = (got - expected).norm() / expected.norm()
    assert error < 0.05


@pytest.mark.skipif(
    not (NANO / "model.safetensors").exists(), reason="carrel-nano's weights are not there yet"
)
def test_carrel_nano_equals_transformers() -> None:
    from transformers import AutoModelForCausalLM

    rival = AutoModelForCausalLM.from_pretrained(NANO, dtype=torch.float32).eval()
    loaded = load_model(str(NANO), device="cpu", dtype=torch.float32)
    token_ids = random_token_ids(120)
    assert loaded.config.eos_token_ids
    ours, expected = dense_forward(loaded.decoder, token_ids), rival_logits(rival, token_ids)
    # Its logits reach 40, and float32's rounding leaves both 1e-4 from what float64 gives.
    torch.testing.assert_close(ours, expected, atol=1e-5 * float(expected.abs().max()), rtol=0)
