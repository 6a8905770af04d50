"""`transformers` with random weights: decoding behind a cache filled at random, and prefilling a real prompt.

Weights come from a config, so nothing is downloaded; attention is PyTorch's fused one, as `transformers` chooses.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

from benchmarks.device import default_dtype, limited, peak_bytes
from benchmarks.errors import NotMeasurable
from benchmarks.figures import DecodeCase, DecodeFigures, PrefillCase, PrefillFigures
from benchmarks.shapes import ModelShape
from benchmarks.timing import time_blocking
from gpu_worker.row_format import row_format


def random_model(shape: ModelShape, device: torch.device, max_len: int) -> Any:
    """A LlamaForCausalLM in the device's type, initialised there."""
    config = LlamaConfig(**shape.config_fields(max_len))
    with device:
        model = AutoModelForCausalLM.from_config(
            config, dtype=default_dtype(device), attn_implementation="sdpa"
        )
    return model.to(device).eval()


class TransformersDecode:
    """Forward calls behind a DynamicCache. is_offloaded: its layers lie in host memory, and come one ahead of need."""

    def __init__(self, shape: ModelShape, device: torch.device, is_offloaded: bool = False) -> None:
        # its own streams are CUDA's
        if is_offloaded and device.type != "cuda":
            raise NotMeasurable("the offloaded cache of transformers needs a GPU")
        self._shape, self._device, self._is_offloaded = shape, device, is_offloaded
        self._model = random_model(shape, device, shape.max_len + 1024)

    @torch.inference_mode()
    def measure(self, case: DecodeCase) -> DecodeFigures:
        with limited(self._device, case.gpu_memory_limit):
            return self._decode(case)

    def _decode(self, case: DecodeCase) -> DecodeFigures:
        cache = self._random_cache(case)
        token_ids = torch.zeros(case.batch, 1, dtype=torch.int64, device=self._device)

        def step() -> None:
            logits = self._model(token_ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            token_ids.copy_(logits[:, -1:].argmax(-1))

        micros = time_blocking(step, case.steps, self._device)
        row_bytes = row_format(self._shape.head_dim, default_dtype(self._device)).row_bytes
        kv_bytes = self._shape.kv_bytes(case.batch * case.context, row_bytes)
        return DecodeFigures(
            micros.scaled(1e-3),
            peak_bytes(self._device),
            host_bytes=kv_bytes if self._is_offloaded else 0,
            bytes_moved=float(kv_bytes) if self._is_offloaded else 0.0,
            attended_tokens=float(case.context),
        )

    def _random_cache(self, case: DecodeCase) -> DynamicCache:
        """As a prefill would leave it: when it is offloaded, only the first layer is on the device."""
        cache = DynamicCache(config=self._model.config, offloading=self._is_offloaded)
        shape = self._shape
        size = (case.batch, shape.num_kv_heads, case.context, shape.head_dim)
        layers: list[Any] = cache.layers
        for index, layer in enumerate(layers):
            pair = (
                torch.empty(size, device=self._device, dtype=default_dtype(self._device)) for _ in range(2)
            )
            keys, values = (each.normal_() for each in pair)
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
            if self._is_offloaded and index:
                layer.offload()
        return cache


class TransformersPrefill:
    """One forward call over the whole prompt into an empty DynamicCache, then one decode step."""

    def __init__(self, shape: ModelShape, device: torch.device) -> None:
        self._shape, self._device = shape, device
        self._model = random_model(shape, device, shape.max_len + 1024)

    @torch.inference_mode()
    def measure(self, case: PrefillCase) -> PrefillFigures:
        with limited(self._device, case.gpu_memory_limit):
            prompt = torch.randint(self._shape.vocab_size, (1, case.context), device=self._device)
            first = time_blocking(lambda: self._tokens(prompt, 1), case.repeats, self._device)
            second = time_blocking(lambda: self._tokens(prompt, 2), case.repeats, self._device)
            return PrefillFigures(first.scaled(1e-3), second.scaled(1e-3), peak_bytes(self._device))

    def _tokens(self, prompt: torch.Tensor, count: int) -> list[int]:
        tokens: list[int] = []
        inputs, cache = prompt, DynamicCache(config=self._model.config)
        while len(tokens) < count:
            logits = self._model(inputs, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            tokens.append(int(logits[0, -1].argmax()))
            inputs = torch.tensor([tokens[-1:]], device=self._device)
        return tokens
