from __future__ import annotations

from pathlib import Path

import pytest
import torch
from dense_forward import dense_forward
from tiny_models import CONFIGS, random_token_ids, save_model

from gpu_worker.models import load_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("name", CONFIGS)
def test_cuda_equals_cpu(name: str, tmp_path: Path) -> None:
    save_model(CONFIGS[name](), tmp_path)
    token_ids = random_token_ids(150)
    expected = dense_forward(load_model(str(tmp_path), device="cpu", dtype=torch.float32).decoder, token_ids)
    decoder = load_model(str(tmp_path), device="cuda", dtype=torch.float32).decoder
    got = dense_forward(decoder, token_ids.cuda())
    torch.testing.assert_close(got.cpu(), expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("name", ["llama3-group4-tied", "qwen3", "glm4"])
def test_a_step_can_be_captured(name: str, tmp_path: Path) -> None:
    save_model(CONFIGS[name](), tmp_path)
    decoder = load_model(str(tmp_path), device="cuda", dtype=torch.bfloat16).decoder
    token_ids, positions = torch.zeros(3, dtype=torch.int64).cuda(), torch.zeros(3, dtype=torch.int64).cuda()

    @torch.inference_mode()
    def step() -> torch.Tensor:
        hidden = decoder.embed(token_ids)
        for layer in range(decoder.config.num_layers):
            queries, _, _ = decoder.project_qkv(layer, hidden, positions)
            hidden = decoder.finish_layer(layer, hidden, queries)
        return decoder.logits(hidden)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    token_ids.copy_(torch.tensor([5, 6, 7]))
    positions.copy_(torch.tensor([0, 40, 200]))
    graph.replay()
    torch.testing.assert_close(captured, step())
