"""The same model in `transformers`: through `generate`, and through bare forward calls."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from benchmarks.rivals.base import Rival
from benchmarks.runs import Answer


def generate(model: str, max_model_len: int) -> Rival:
    return Generate(load(model))


def forward(model: str, max_model_len: int) -> Rival:
    return Forward(load(model))


def load(model: str) -> PreTrainedModel:
    """In float32 with PyTorch's fused attention, as `transformers` chooses by itself."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
    loaded.eval()
    return loaded


class Clock(BaseStreamer):
    """Notes when each new token comes; the first call brings the prompt."""

    def __init__(self) -> None:
        self.calls: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.calls.append(time.perf_counter())

    def end(self) -> None:
        """Nothing to do."""


class Transformers(Rival):
    """A loaded model; it holds nothing but memory."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def close(self) -> None:
        """Nothing outlives the process."""


class Generate(Transformers):
    """What users of `transformers` call: `generate` with a DynamicCache."""

    @torch.inference_mode()
    def answer(self, token_ids: Sequence[int], num_tokens: int) -> Answer:
        clock = Clock()
        prompt = torch.tensor([token_ids])
        begin = time.perf_counter()
        output = cast(Any, self._model).generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            past_key_values=DynamicCache(config=self._model.config),
            streamer=clock,
        )
        return Answer.from_times(output[0, len(token_ids) :].tolist(), begin, clock.calls[1:])


class Forward(Transformers):
    """The least that `transformers` can do: forward calls and argmax, with no generation loop around them."""

    @torch.inference_mode()
    def answer(self, token_ids: Sequence[int], num_tokens: int) -> Answer:
        tokens: list[int] = []
        times: list[float] = []
        begin = time.perf_counter()
        inputs, cache = torch.tensor([token_ids]), DynamicCache(config=self._model.config)
        while len(tokens) < num_tokens:
            logits = self._model(inputs, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            tokens.append(int(logits[0, -1].argmax()))
            times.append(time.perf_counter())
            inputs = torch.tensor([tokens[-1:]])
        return Answer.from_times(tokens, begin, times)
