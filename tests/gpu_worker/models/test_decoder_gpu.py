from __future__ import annotations

from pathlib import Path

import pytest
import torch
from dense_forward import dense_forward
from tiny_models import BLOCKS, CONFIGS, MAX_POSITIONS, random_token_ids, save_model
from torch import Tensor

from gpu_worker.models import Decoder, load_model

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


NAMES = ["llama-group1", "llama-linear-biases", "llama-3-group4-tied", "qwen3-biases", "glm", "glm4", *BLOCKS]
# Of a layer's outputs, in the Euclidean norm.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@torch.inference_mode()
def run_layer(decoder: Decoder, hidden: Tensor, positions: Tensor, attention: Tensor) -> list[Tensor]:
    return [
        *decoder.project_qkv(1, hidden, positions),
        decoder.finish_layer(1, hidden, attention),
        decoder.logits(hidden),
    ]


def layer_inputs(decoder: Decoder, num_tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, positions and attention on the decoder's device."""
    config, generator = decoder.config, torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, config.hidden_size, generator=generator)
    positions = torch.randint(0, MAX_POSITIONS, (num_tokens,), generator=generator)
    attention = torch.randn(num_tokens, config.num_heads, config.head_dim, generator=generator)
    device, dtype = decoder.device, decoder.dtype
    return hidden.to(device, dtype), positions.to(device), attention.to(device, dtype)


def assert_near(got: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for mine, exact in zip(got, expected, strict=True):
        assert mine.shape == exact.shape
        assert (mine.cpu().float() - exact).norm() <= tolerance * exact.norm()


@pytest.mark.parametrize("num_tokens", [1, 5, 33])
@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("name", NAMES)
def test_a_layer_equals_float32_on_the_cpu(
    name: str, dtype: torch.dtype, num_tokens: int, tmp_path: Path
) -> None:
    save_model(CONFIGS[name](), tmp_path)
    # The same rounded weights, computed with in float32.
    exact = load_model(str(tmp_path), device="cpu", dtype=dtype).decoder.float()
    decoder = load_model(str(tmp_path), device="cuda", dtype=dtype).decoder
    inputs = layer_inputs(decoder, num_tokens, seed=0)
    before = [part.clone() for part in inputs]

    def expected() -> list[Tensor]:
        hidden, positions, attention = (part.cpu() for part in inputs)
        return run_layer(exact, hidden.float(), positions, attention.float())

    eager = run_layer(decoder, *inputs)
    assert_near(eager, expected(), TOLERANCES[dtype])
    assert all(torch.equal(part, old) for part, old in zip(inputs, before, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run_layer(decoder, *inputs)
    graph.replay()
    for replayed, ran in zip(captured, eager, strict=True):
        torch.testing.assert_close(replayed, ran)
    for part, other in zip(inputs, layer_inputs(decoder, num_tokens, seed=1), strict=True):
        part.copy_(other)
    graph.replay()
    assert_near(captured, expected(), TOLERANCES[dtype])


@pytest.mark.parametrize(("name", "num_norms"), [("llama-group1", 2), ("qwen3", 2), ("glm4", 3)])
def test_between_products_there_are_only_kernels_of_ours(name: str, num_norms: int, tmp_path: Path) -> None:
    save_model(CONFIGS[name](), tmp_path)
    decoder = load_model(str(tmp_path), device="cuda", dtype=torch.bfloat16).decoder
    hidden, positions, attention = layer_inputs(decoder, 4, seed=0)

    @torch.inference_mode()
    def layer() -> None:
        decoder.project_qkv(1, hidden, positions)
        decoder.finish_layer(1, hidden, attention)

    layer()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        layer()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type.name == "CUDA"]
    counts = {name: names.count(name) for name in ("_rms_norm", "_rope", "_silu_mul")}
    assert counts == {"_rms_norm": num_norms, "_rope": 1, "_silu_mul": 1}, names
    # PyTorch's own: an addition, a copy, a concatenation.
    assert not [name for name in names if "at::native" in name or "Memcpy" in name], names


@pytest.mark.parametrize("name", ["llama-3-group4-tied", "qwen3", "glm4", *BLOCKS])
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
