"""Floating-point operations of prompts, by the model's configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # it imports PyTorch
    from gpu_worker.models import ModelConfig


def layer_work(config: ModelConfig, begin: int, end: int) -> float:
    """Floating-point operations of one layer for the tokens at [begin, end) of a prompt."""
    heads = config.num_heads * config.head_dim
    # the last layer is like most: where layers differ, the first ones are special
    weights = config.hidden_size * heads + config.layers[-1].mlp.num_weights
    return last_layer_work(config, begin, end) + (end - begin) * (2.0 * weights + 2.0 * heads * (begin + end))


def last_layer_work(config: ModelConfig, begin: int, end: int) -> float:
    """The same of the last layer, of which keys and values are needed, and only the last token's output."""
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    return (end - begin) * 2.0 * config.hidden_size * heads


def prompt_work(config: ModelConfig, begin: int, end: int) -> float:
    """Floating-point operations of all layers for the tokens at [begin, end) of a prompt."""
    return (config.num_layers - 1) * layer_work(config, begin, end) + last_layer_work(config, begin, end)
