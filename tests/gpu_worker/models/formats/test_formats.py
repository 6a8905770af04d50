"""Checkpoints in every quantised format are the models that their formulas say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from dense_forward import dense_forward
from packers import CODEBOOKS, FP8, INT4, Packing, fp8_rows, write_packed
from safetensors.torch import load_file, save_file
from tiny_models import CONFIGS, random_token_ids
from torch import Tensor

from gpu_worker.errors import ModelError
from gpu_worker.layers import packed
from gpu_worker.models import LoadedModel, check_model, load_model, weights_digest

TOKENS = random_token_ids(60)
FORMATS = FP8 | INT4 | CODEBOOKS
# A configuration of each.
FAMILIES = list({CONFIGS[name]().model_type: name for name in reversed(CONFIGS)}.values())


def load(path: Path, dtype: torch.dtype = torch.float32, **options: object) -> LoadedModel:
    return load_model(str(path), device="cpu", dtype=dtype, **options)  # type: ignore[arg-type]


def log_probs(path: Path, **options: object) -> Tensor:
    return dense_forward(load(path, **options).decoder, TOKENS).log_softmax(-1)


def assert_twins(packed: Path, twin: Path) -> None:
    expected = log_probs(twin)
    assert expected.std() > 0.3
    torch.testing.assert_close(log_probs(packed), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", FORMATS)
def test_log_probabilities_are_those_of_the_plain_twin(name: str, tmp_path: Path) -> None:
    assert_twins(*write_packed(FORMATS[name], tmp_path))


@pytest.mark.parametrize("name", ["fp8-block", "compressed-channel", "awq-128", "gptq-order", "nf4"])
@pytest.mark.parametrize(
    "plain", [("0.self_attn.o_proj",), ("k_proj", "1.mlp.up_proj"), ("q_proj", "down_proj")]
)
def test_modules_that_are_not_quantised_stay_as_they_are(
    name: str, plain: tuple[str, ...], tmp_path: Path
) -> None:
    assert_twins(*write_packed(FORMATS[name], tmp_path, plain=plain))


@pytest.mark.parametrize("base", ["qwen2-tied", "glm"])
def test_heads_of_their_own_and_fused_matrices_are_read(base: str, tmp_path: Path) -> None:
    also = ("lm_head",) if base == "glm" else ()
    assert_twins(*write_packed(FORMATS["compressed-channel"], tmp_path, base, also=also))


@pytest.mark.parametrize(
    ("name", "base"),
    [
        *((name, "llama-linear-biases") for name in FP8 | INT4),
        *((name, base) for name in ("compressed-channel", "gptq-order") for base in FAMILIES),
    ],
)
def test_a_packed_matrix_is_as_good_as_its_plain_twin(
    name: str, base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU holds it, in bfloat16: no farther from float32 than the twin is."""
    path, twin = write_packed(FORMATS[name], tmp_path, base)
    assert_twins(path, twin)
    exact = log_probs(twin)
    usual = (log_probs(twin, dtype=torch.bfloat16) - exact).square().mean().sqrt()
    monkeypatch.setattr(packed, "PACKING_DEVICES", ("cpu",))
    # some products of few rows, some of many
    monkeypatch.setattr(packed, "FEW_ROWS", dict.fromkeys(packed.FEW_ROWS, 10))
    model = load(path, torch.bfloat16)
    assert model.num_parameters == load(twin).num_parameters
    assert model.decoder.packed_kinds
    assert sum(each.nbytes for each in model.decoder.state_dict().values()) < 0.8 * sum(
        each.nbytes for each in load(twin, torch.bfloat16).decoder.state_dict().values()
    )
    for token_ids in (TOKENS, TOKENS[:10]):
        found = dense_forward(model.decoder, token_ids).log_softmax(-1)
        assert (found - exact[: len(token_ids)]).square().mean().sqrt() < 1.5 * usual


def test_a_leftover_configuration_over_plain_weights_loads_plain(tmp_path: Path) -> None:
    path, twin = write_packed(FORMATS["fp8-tensor"], tmp_path)
    config = (path / "config.json").read_text()
    (twin / "config.json").write_text(config)
    assert_twins(twin, path)
    assert not load(twin).decoder.packed_kinds


def edit_weights(path: Path, name: str, tensor: Tensor | None) -> None:
    tensors = load_file(path / "model.safetensors")
    tensors.pop(name, None)
    if tensor is not None:
        tensors[name] = tensor
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


UP = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({f"{UP}.weight_scale": None}, r"mlp\.up_proj\.weight is of type F8_E4M3, and the weights lack"),
        ({f"{UP}.weight_scale": torch.ones(383, 1)}, r"up_proj\.weight_scale has shape \[383, 1\]"),
        ({f"{UP}.weight_scale": torch.ones(384, 1).int()}, r"up_proj\.weight_scale is of type I32"),
        (
            {f"{UP}.weight": torch.full((384, 256), torch.nan).to(torch.float8_e4m3fn)},
            r"up_proj: an 8-bit weight is not a number",
        ),
        ({f"{UP}.weight": torch.ones(384, 256).to(torch.float8_e5m2)}, r"up_proj.*weight_scale"),
        ({f"{UP}.weight": torch.tensor(1.0).to(torch.float8_e4m3fn)}, r"up_proj\.weight_scale"),
        (
            {f"{UP}.weight_scale": torch.full((384, 1), torch.inf)},
            r"up_proj\.weight_scale has .* not finite in",
        ),
        ({f"{UP}.odd": torch.ones(3)}, r"the weights have model\.layers\.1\.mlp\.up_proj\.odd"),
    ],
)
def test_what_is_damaged_is_named(change: dict[str, Tensor | None], message: str, tmp_path: Path) -> None:
    path, _ = write_packed(FORMATS["compressed-channel"], tmp_path)
    for name, tensor in change.items():
        edit_weights(path, name, tensor)
    with pytest.raises(ModelError, match=message):
        load(path)


@pytest.mark.parametrize(
    ("name", "scales", "value", "message"),
    [
        # numbers and scales can be held, and their products cannot
        ("compressed-channel", "weight_scale", torch.full((384, 1), 6e4), r"mlp\..*, or another matrix of the same"),
        ("awq-128", "scales", torch.full((2, 384), torch.inf), r"mlp\.up_proj\.scales has"),
    ],
)  # fmt: skip
def test_values_that_are_not_finite_in_a_type_are_named(
    name: str, scales: str, value: Tensor, message: str, tmp_path: Path
) -> None:
    path, _ = write_packed(FORMATS[name], tmp_path)
    edit_weights(path, f"{UP}.{scales}", value)
    with pytest.raises(ModelError, match=rf"layers\.1\.{message}.* not finite in float16"):
        load(path, torch.float16)


def test_blocks_of_a_damaged_size_are_named(tmp_path: Path) -> None:
    path, _ = write_packed(Packing(FORMATS["fp8-block"].pack, {"weight_block_size": [128]}), tmp_path)
    with pytest.raises(ModelError, match=r"'weight_block_size' is \[128\]; expected a list of 2 positive"):
        load(path)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("awq-128", {"bits": 8}, "'bits' is 8; expected 4"),
        ("awq-128", {"version": "gemv"}, "'version' is 'gemv'; expected one of gemm"),
        (
            "gptq-order",
            {"quant_method": "gptq", "checkpoint_format": "marlin"},
            "'checkpoint_format' is 'marlin'",
        ),
        (
            "gptq-64-asym",
            {"quant_method": "gptq", "sym": True, "group_size": 64},
            "_proj: .*`sym`, but zeros",
        ),
        ("gptq-order", {"group_size": 64}, r"has shape \[[23], \d+\]; config.json asks for \[[46], \d+\]"),
        ("w4a16-128", {"config_groups": {"a": {"weights": {"num_bits": 8}}}}, "'num_bits' is 8; expected 4"),
        (
            "w4a16-128",
            {"config_groups": {"a": {"weights": {"group_size": 0}}}},
            "'group_size' is 0; expected",
        ),
    ],
)
def test_settings_that_do_not_fit_are_named(
    name: str, settings: dict[str, object], message: str, tmp_path: Path
) -> None:
    path, _ = write_packed(Packing(FORMATS[name].pack, settings), tmp_path)
    with pytest.raises(ModelError, match=message):
        load(path)


@pytest.mark.parametrize(
    ("name", "tensor", "value", "message"),
    [
        ("gptq-order", "g_idx", torch.zeros(256).int(), r"up_proj: the columns' groups \(g_idx\) are not of 128"),
        ("gptq-order", "scales", None, "the weights lack .*up_proj.scales"),
        ("awq-128", "qzeros", None, "the weights lack .*up_proj.qzeros"),
        ("w4a16-128", "weight_scale", torch.ones(3), "the weights lack .*up_proj.weight_scale, a scale for each"),
        ("nf4", "weight.quant_state.bitsandbytes__nf4", torch.zeros(9).byte(), "up_proj: its bitsandbytes__nf4 can"),
        ("nf4", "weight.absmax", torch.tensor(1.0), r"up_proj.weight.absmax has shape \[\]"),
        ("nf4", "weight.absmax", None, "weight is of type U8, and the weights lack its quant_state or absmax"),
        ("nf4", "weight.absmax", torch.ones(7), r"up_proj: it has shape \[384, 256\] in blocks of 64; expected"),
    ],
)  # fmt: skip
def test_a_damaged_matrix_of_4_bits_is_named(
    name: str, tensor: str, value: Tensor | None, message: str, tmp_path: Path
) -> None:
    path, _ = write_packed(FORMATS[name], tmp_path)
    edit_weights(path, f"{UP}.{tensor}", value)
    with pytest.raises(ModelError, match=message):
        load(path)


def five_bits(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    return {"weight": weight.to(torch.float8_e5m2), "codebook": torch.ones(3)}, weight


@pytest.mark.parametrize(
    ("settings", "said"), [({"quant_method": "quark"}, "quantised by 'quark'"), (None, "in an unknown way")]
)
def test_other_formats_are_refused_by_their_names(
    settings: dict[str, object] | None, said: str, tmp_path: Path
) -> None:
    path, _ = write_packed(Packing(five_bits, settings), tmp_path)
    with pytest.raises(ModelError, match=rf"{said} \(.*weight is of type F8_E5M2\).*supported: fp8"):
        check_model(str(path), revision=None, load_format="safetensors")


@pytest.mark.parametrize("quantization", ["fp8", "int4"])
def test_plain_weights_are_quantised_while_they_are_read(
    quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a checkpoint of fp8 rows is."""
    path, twin = write_packed(Packing(fp8_rows((-1, 1))), tmp_path)
    packed_twin = log_probs(path)
    (plain := tmp_path / "plain").mkdir()
    plain = write_packed(Packing(fp8_rows((-1, 1))), plain, plain=("_proj",))[0]
    made = log_probs(plain, quantization="fp8")
    torch.testing.assert_close(made, packed_twin, atol=1e-4, rtol=0)
    assert (made - log_probs(plain)).abs().max() > 1e-3
    # what is so already stays as it is
    assert torch.equal(log_probs(path, quantization="fp8"), packed_twin)
    with pytest.raises(ModelError, match="quantization 'fp7' is not supported; supported: fp8, int4"):
        load(twin, quantization="fp7")
    with pytest.raises(ModelError, match="quantised as fp8 already, and cannot become int4"):
        load(path, quantization="int4")
    assert 1e-3 < (log_probs(plain, quantization="int4") - log_probs(plain)).abs().mean() < 0.5
    monkeypatch.setattr(packed, "PACKING_DEVICES", ("cpu",))
    for options in ({}, {"load_format": "dummy"}):
        model = load(plain, torch.bfloat16, **{"quantization": quantization, **options})
        assert model.decoder.packed_kinds == ("PackedWeights",)
        assert model.decoder.product_bytes == packed.UNPACKED_BYTES
        assert weights_digest(model.decoder) != weights_digest(load(plain, torch.bfloat16).decoder)
        logits = dense_forward(model.decoder, TOKENS)
        assert logits.isfinite().all()
        assert logits.std() > 0


def test_settings_that_are_not_json_are_named(tmp_path: Path) -> None:
    path, _ = write_packed(Packing(FORMATS["unsaid"].pack, files={"quantize_config.json": {}}), tmp_path)
    assert json.loads((path / "quantize_config.json").read_text()) == {}
    (path / "quantize_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"quantize_config\.json is not valid JSON"):
        load(path)
