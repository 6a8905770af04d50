"""Retain: each layer keeps a part of the prompt, or means of it."""

from gpu_worker.policies.retain.base import LayerRows, Retained, RetainPolicy, ScoredPolicy
from gpu_worker.policies.retain.streaming_llm import StreamingLLM

__all__ = ["LayerRows", "RetainPolicy", "Retained", "ScoredPolicy", "StreamingLLM"]
