"""The decoder as a GPU runs it, with every kernel in Triton's interpreter, against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from dense_forward import dense_forward
from tiny_models import CONFIGS, random_token_ids, rival_logits, save_model

from gpu_worker.layers import attention, mlp, norm
from gpu_worker.models import load_model

pytest.importorskip("triton")

from gpu_worker.kernels.rms_norm import kernel as rms_norm_kernel
from gpu_worker.kernels.rope import kernel as rope_kernel
from gpu_worker.kernels.silu_mul import kernel as silu_mul_kernel


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("the GPU runs the kernels for real")
    monkeypatch.setattr(norm, "rms_norm", rms_norm_kernel.rms_norm)
    monkeypatch.setattr(norm, "add_normed", rms_norm_kernel.add_normed)
    monkeypatch.setattr(attention, "rope", rope_kernel.rope)
    monkeypatch.setitem(mlp.ACTIVATIONS, "silu_mul", silu_mul_kernel.silu_mul)


@pytest.mark.parametrize(
    "name",
    [
        "llama-linear-biases",
        "llama-3-group4-tied",
        "qwen2-tied",
        "qwen3-biases",
        "glm",
        "glm4",
        "phi3-4-mini",
        "ministral3",
        "smollm3",
        "hunyuan_v1_dense",
        "olmo2-group4",
        "gemma",
        "cohere",
    ],
)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    rival = save_model(CONFIGS[name](), tmp_path)
    decoder = load_model(str(tmp_path), device="cpu", dtype=torch.float32).decoder
    token_ids = random_token_ids(9)
    got, expected = dense_forward(decoder, token_ids), rival_logits(rival, token_ids)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
