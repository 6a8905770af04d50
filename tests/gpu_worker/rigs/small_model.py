"""A tiny random model whose attention is peaked, and samples of its tokens."""

from __future__ import annotations

import random

import torch

from gpu_worker.models import Decoder, ModelConfig, RopeConfig

NUM_LAYERS, NUM_KV_HEADS, GROUP, HEAD_DIM, VOCAB_SIZE = 3, 2, 3, 16, 97


def make_config() -> ModelConfig:
    return ModelConfig(
        model_type="llama",
        vocab_size=VOCAB_SIZE,
        hidden_size=48,
        intermediate_size=64,
        num_layers=NUM_LAYERS,
        num_heads=GROUP * NUM_KV_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        rms_norm_eps=1e-5,
        rope=RopeConfig("default", 10000.0, HEAD_DIM),
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )


def make_decoder() -> Decoder:
    decoder = Decoder(make_config(), torch.device("cpu"), torch.float32)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in decoder.named_parameters():
        if parameter.dim() == 1:
            parameter.data.fill_(1.0)
        else:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data.copy_((1.6 if "qkv" in name else 1.0) * noise / parameter.shape[1] ** 0.5)
    return decoder


def make_sample(length: int, seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(VOCAB_SIZE) for _ in range(length)]
