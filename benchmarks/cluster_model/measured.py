"""The model's inputs that were measured on one GPU and one gateway process, all of them committed."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.cluster_model.parameters import ClusterParameters
from benchmarks.errors import BenchmarkError
from benchmarks.load.gateway_cost import GatewayCost
from benchmarks.shapes import SHAPES, ModelShape
from gpu_worker.engine.memory import MemoryPlan
from gpu_worker.engine.workload import Workload
from gpu_worker.models import ModelConfig
from gpu_worker.models.config import RopeConfig
from gpu_worker.policies.base import CacheShape
from gpu_worker.policies.registry import registry
from gpu_worker.records import Budget

RESULTS = Path(__file__).resolve().parents[1] / "results"
ELEMENT_BYTES = 2
# whose rows are of the engine with its index where decoding was measured with it
PREFILL_RIVAL = "carrel index on gpu"


@dataclass(frozen=True)
class StepTime:
    """A decode step in ms, fitted: `fixed`, more for each sequence, more for each 1024 tokens of all contexts.

    error: the largest share by which a measured step differs from it.
    """

    fixed_ms: float
    sequence_ms: float
    context_ms: float
    error: float

    def ms(self, num_sequences: int, num_tokens: float) -> float:
        return self.fixed_ms + self.sequence_ms * num_sequences + self.context_ms * num_tokens / 1024

    @classmethod
    def fitted(cls, steps: list[tuple[int, int, float]]) -> StepTime:
        """Least squares of relative errors over (sequences, tokens of each, ms)."""
        inputs = np.array([(1.0, batch, batch * context / 1024) for batch, context, _ in steps])
        times = np.array([ms for *_, ms in steps])
        found, *_ = np.linalg.lstsq(inputs / times[:, None], np.ones(len(steps)), rcond=None)
        fixed, sequence, context = (max(0.0, float(value)) for value in found)
        made = inputs @ np.array([fixed, sequence, context])
        return cls(fixed, sequence, context, float(np.max(np.abs(made / times - 1))))


@dataclass(frozen=True)
class PrefillTime:
    """Seconds of a prompt by its floating-point operations: `ms` were measured at `context` tokens.

    Other lengths are extrapolated: matrix products grow with the tokens, attention with their square.
    """

    shape: ModelShape
    context: int
    ms: float

    def seconds(self, num_tokens: int, num_known: int = 0) -> float:
        """Of the tokens after the `num_known` first, whose rows are there."""
        done = self._operations(num_tokens) - self._operations(num_known)
        return self.ms / 1000 * done / self._operations(self.context)

    def _operations(self, num_tokens: int) -> float:
        shape = self.shape
        tables = (1 if shape.tie_word_embeddings else 2) * shape.vocab_size * shape.hidden_size
        products = 2.0 * (shape.num_weights - tables) * num_tokens
        return products + 2.0 * shape.num_layers * shape.num_heads * shape.head_dim * float(num_tokens) ** 2


@dataclass(frozen=True)
class Measured:
    """Of one GPU and one gateway process. slot_tokens: what the engine's memory plan leaves for slots, computed."""

    policy: str
    step: StepTime
    prefill: PrefillTime
    gateway: GatewayCost
    from_host_bytes_per_s: float
    token_bytes: int
    slot_tokens: int
    num_layers: int
    sources: dict[str, str]


def read_measured(policy: str, parameters: ClusterParameters, folder: Path = RESULTS) -> Measured:
    """From the committed results. Raises BenchmarkError where they lack something."""
    shape = SHAPES["llama-3.1-8b"]
    decode, prefill, kernels, gateway = (
        _read(folder / f"{name}.json")
        for name in ("decode_h200", "prefill_h200", "kernels_h200", "gateway_cpu")
    )
    steps = [
        (row["case"]["batch"], row["case"]["context"], row["figures"]["step_ms"]["median"])
        for row in _rows(decode, "carrel", policy)
    ]
    prompts = _rows(prefill, PREFILL_RIVAL, policy)
    if len(steps) < 3 or not prompts:
        raise BenchmarkError(f"no committed figures of {policy}: choose full or pqcache")
    # The longest: short prompts wait for launches more than for operations.
    context, ttft = max((row["case"]["context"], row["figures"]["ttft_ms"]["median"]) for row in prompts)
    return Measured(
        policy=policy,
        step=StepTime.fitted(steps),
        prefill=PrefillTime(shape, context, ttft),
        gateway=GatewayCost(**gateway["shapes"]["cost"]),
        from_host_bytes_per_s=1e12 * kernels["shapes"]["copies"]["from_host_tb_per_s"],
        token_bytes=shape.kv_bytes(1, ELEMENT_BYTES),
        slot_tokens=memory_plan(shape, parameters, policy).slots // shape.kv_bytes(1, ELEMENT_BYTES),
        num_layers=shape.num_layers,
        sources={
            "step": f"decode_h200.json, {len(steps)} cases of carrel {policy}, least squares",
            "prefill": f"prefill_h200.json, longest case: {context} tokens, {PREFILL_RIVAL}; others extrapolated",
            "from_host": "kernels_h200.json, a plain copy",
            "gateway": f"gateway_cpu.json, on {gateway['about']['machine']['cpu']}",
            "slot_tokens": "computed by gpu_worker/engine/memory.py",
        },
    )


def memory_plan(shape: ModelShape, parameters: ClusterParameters, policy: str) -> MemoryPlan:
    """As a worker with the default options would split the memory that the weights leave."""
    available = parameters.gpu_bytes - ELEMENT_BYTES * shape.num_weights
    policies = {name: registry()[name] for name in {"full", "pqcache", policy}}
    cache = CacheShape(
        max_num_seqs=parameters.max_num_seqs,
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        group_size=shape.num_heads // shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_model_len=shape.max_len,
        scale=shape.head_dim**-0.5,
        device=torch.device("meta"),
    )
    workload = Workload(
        model=model_config(shape),
        shape=replace(cache, dtype=torch.bfloat16),
        dtype=torch.bfloat16,
        policies=policies,
        default_policy=policy,
        default_budget=Budget(tokens=2048),
        prefill_chunk=parameters.prefill_chunk,
        full_layers=0,
        trains_indexes=True,
    )
    return MemoryPlan.of(workload, available)


def model_config(shape: ModelShape) -> ModelConfig:
    return ModelConfig(
        model_type="llama",
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.rms_norm_eps,
        rope=RopeConfig("default", shape.rope_theta, shape.head_dim),
        max_position_embeddings=shape.max_len,
        tie_word_embeddings=shape.tie_word_embeddings,
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as exc:
        raise BenchmarkError(f"{path} cannot be read: {exc}") from exc
    return content


def _rows(content: dict[str, Any], rival: str, policy: str) -> list[dict[str, Any]]:
    """Those of a rival under a policy that succeeded, with all of the device's memory."""
    return [
        row
        for row in content["rows"]
        if row["rival"] == rival
        and row["case"]["policy"] == policy
        and row["case"]["gpu_memory_limit"] is None
        and row["figures"]
    ]
