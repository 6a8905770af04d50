"""The minimal dense loop: what any engine with dense attention can at best reach with PyTorch's kernels.

Static caches filled at random, SDPA over all of them, argmax, one step in one CUDA graph. It leaves out what a real
loop needs (storing the new keys and values, sampling, admission), so it is a floor of the step and not an engine.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.device import default_dtype, limited, peak_bytes
from benchmarks.figures import DecodeCase, DecodeFigures, PrefillCase, PrefillFigures
from benchmarks.rivals.dense_model import Attend, DenseModel
from benchmarks.shapes import ModelShape
from benchmarks.timing import time_blocking, time_steps


class MinimalDense:
    """has_attention: False leaves the attention out, so that only the weights are read."""

    def __init__(self, shape: ModelShape, device: torch.device, has_attention: bool = True) -> None:
        self._model = DenseModel(shape, device, default_dtype(device))
        self._has_attention = has_attention

    @torch.inference_mode()
    def measure(self, case: DecodeCase) -> DecodeFigures:
        device = self._model.device
        with limited(device, case.gpu_memory_limit):
            return self._decode(case)

    def _decode(self, case: DecodeCase) -> DecodeFigures:
        model = self._model
        attend = self._attend_random(case) if self._has_attention else _attend_nothing
        token_ids = torch.zeros(case.batch, dtype=torch.int64, device=model.device)
        rotation = model.rotation(torch.full((case.batch,), case.context - 1, device=model.device))

        def step() -> None:
            token_ids.copy_(model.next_tokens(token_ids, rotation, attend, case.batch))

        spread = time_steps(captured(step, model.device), case.steps, model.device)
        attended = float(case.context) if self._has_attention else 0.0
        return DecodeFigures(spread, peak_bytes(model.device), attended_tokens=attended)

    def _attend_random(self, case: DecodeCase) -> Attend:
        """Attention over keys and values of its own, [L] of [B, H_kv, N, d]."""
        shape, model = self._model.shape, self._model
        size = (case.batch, shape.num_kv_heads, case.context, shape.head_dim)

        def cache() -> list[Tensor]:
            empty = (
                torch.empty(size, device=model.device, dtype=model.dtype) for _ in range(shape.num_layers)
            )
            return [each.normal_() for each in empty]

        keys, values = cache(), cache()

        def attend(layer: int, queries: Tensor, _keys: Tensor, _values: Tensor) -> Tensor:
            attention = F.scaled_dot_product_attention(
                queries[:, :, None], keys[layer], values[layer], enable_gqa=True
            )
            return attention[:, :, 0]

        return attend


class MinimalDensePrefill:
    """The whole prompt layer by layer, causal SDPA; nothing is stored, so a second token has no time."""

    def __init__(self, shape: ModelShape, device: torch.device) -> None:
        self._model = DenseModel(shape, device, default_dtype(device))

    @torch.inference_mode()
    def measure(self, case: PrefillCase) -> PrefillFigures:
        model = self._model
        with limited(model.device, case.gpu_memory_limit):
            token_ids = torch.randint(model.shape.vocab_size, (case.context,), device=model.device)
            rotation = model.rotation(torch.arange(case.context, device=model.device))

            def first_token() -> int:
                return int(model.next_tokens(token_ids, rotation, attend_causally, 1))

            micros = time_blocking(first_token, case.repeats, model.device)
            return PrefillFigures(micros.scaled(1e-3), None, peak_bytes(model.device))


def captured(step: Callable[[], None], device: torch.device) -> Callable[[], object]:
    """`step` as one CUDA graph; on a CPU, itself."""
    if device.type != "cuda":
        return step
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        step()
        step()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _attend_nothing(_layer: int, queries: Tensor, _keys: Tensor, _values: Tensor) -> Tensor:
    return queries


def attend_causally(_layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    query, key, value = (each.transpose(0, 1)[None] for each in (queries, keys, values))
    attention = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return attention[0].transpose(0, 1)
