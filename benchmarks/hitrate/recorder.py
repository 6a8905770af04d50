"""Records what a model selects: its text is decoded word for word, with a slot for every token, so that none misses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from benchmarks.device import default_dtype
from benchmarks.errors import BenchmarkError
from benchmarks.hitrate.cached_request import CachedRequest
from benchmarks.hitrate.recorded_policies import RECORDED, Kept
from gpu_worker.caches import HotCacheSize
from gpu_worker.engine.assemble import EngineOptions, arena_layout, assemble
from gpu_worker.engine.engine import Engine
from gpu_worker.engine.prompts.prefill import Prefill
from gpu_worker.errors import ModelError
from gpu_worker.kernels.attention.reference import BLOCK_SIZE
from gpu_worker.models import load_model
from gpu_worker.policies.recall import RecallPolicy
from gpu_worker.policies.registry import registry
from gpu_worker.records import Budget, ErrorEvent, Event, GenerationRequest, IndexDevice, SamplingParams
from gpu_worker.state.batch import Buckets
from kv_store.client import StoreClient
from kv_store.local import LocalStore

# nothing goes to the store: every token has a slot, and indexes are trained on the device
ARENA_BYTES = 16 << 20


@dataclass(frozen=True)
class Recording:
    """positions: int32 [steps, L, B, H_kv, K], ascending, on the CPU. request: what is the same for all sequences.
    labels: int32 [L, B, H_kv, N], the cluster of every position; None unless the policy selects clusters."""

    positions: Tensor
    request: CachedRequest
    budget_tokens: int
    labels: Tensor | None = None


class Recorder:
    """A loaded model, and its documents' keys and values: prefill depends on neither policy nor budget."""

    def __init__(self, model: Path, device: torch.device) -> None:
        """Raises BenchmarkError."""
        try:
            self.model = load_model(str(model), device=device, dtype=default_dtype(device))
        except ModelError as exc:
            raise BenchmarkError(f"--model {model}: {exc}") from exc
        self._device = device
        self._store = LocalStore(ARENA_BYTES)
        self._prefilled: dict[tuple[int, ...], list[Tensor]] = {}

    def record(
        self, policy: str, budget: float | int, documents: Sequence[tuple[int, ...]], num_steps: int
    ) -> Recording:
        """The selections of the last `num_steps` tokens of each document; the tokens before are prefilled.

        budget: a share of what is prefilled, or tokens. Documents are of one length. Raises BenchmarkError.
        """
        context, asked = len(documents[0]) - num_steps, _budget(budget)
        bare = RECORDED[policy]()
        plan = bare.plan(context, asked.resolve(context))
        if plan.num_selected is None:
            raise BenchmarkError(f"{policy} selects nothing of {context} tokens at a budget of {budget}")
        config = self.model.config
        if len(documents[0]) > config.max_model_len:
            raise BenchmarkError(
                f"{context} tokens and {num_steps} more are too long: the model takes {config.max_model_len}"
            )
        width = Buckets(is_exact=self._device.type != "cuda").width(plan.num_selected)
        kept = Kept(config.num_layers, config.num_kv_heads, width, self._device)
        request = CachedRequest.of(bare, plan, num_steps)
        engine = self._engine(request.capacity, RECORDED[policy](kept=kept))
        steps, labels = [], []
        try:
            for document in documents:
                steps.append(self._steps(engine, policy, asked, document, context, kept))
                if kept.labels is not None:
                    labels.append(kept.labels.to("cpu", copy=True))
        finally:
            engine.close()
        positions = torch.stack(steps, dim=2)[..., : plan.num_selected].contiguous()
        clusters = torch.stack(labels, dim=1) if labels else None
        return Recording(positions, request, plan.budget_tokens, clusters)

    def _steps(
        self,
        engine: Engine,
        policy: str,
        budget: Budget,
        document: tuple[int, ...],
        context: int,
        kept: Kept,
    ) -> Tensor:
        """int32 [steps, L, H_kv, width] of one document."""
        failed: list[Exception] = []

        def sink(event: Event) -> None:
            if isinstance(event, ErrorEvent):
                failed.append(event.error)

        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        engine.submit(GenerationRequest("recorded", document, sampling, policy, budget, context), sink)
        sequence = engine.scheduler.find("recorded")
        assert sequence is not None
        steps: list[Tensor] = []
        while engine.has_work:
            engine.step()
            if sequence.num_tokens > context + len(steps):
                steps.append(kept.positions.to("cpu", copy=True))
        if failed:
            raise BenchmarkError(f"{policy} at {context} tokens: {failed[0]}")
        return torch.stack(steps)

    def _engine(self, capacity: int, policy: RecallPolicy[Any]) -> Engine:
        layout = arena_layout(self.model)
        slots = self.model.config.num_layers * layout.token_bytes * (capacity + BLOCK_SIZE)
        options = EngineOptions(
            max_model_len=capacity,
            slot_bytes=slots,
            max_num_seqs=1,
            hot_cache=HotCacheSize(tokens=capacity),
            policies=registry(policy),
            index_device=IndexDevice.GPU,
        )
        client = StoreClient.connect(self._store.target, layout, worker_id="hitrate")
        return assemble(self.model, client, options, self._make_prefill)

    def _make_prefill(self, sequences: list[Any], *arguments: Any) -> Prefill:
        # The engine has one seat.
        [sequence] = sequences
        token_ids = sequence.request.prompt_token_ids[: sequence.num_prefill]
        return KeptPrefill(self._prefilled.setdefault(token_ids, []), sequences, *arguments)

    def forget(self) -> None:
        """Free the documents' keys and values."""
        self._prefilled.clear()

    def close(self) -> None:
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class KeptPrefill(Prefill):
    """Computes a prompt's rows once and keeps each layer's, [H_kv, n, 2d]; then they are copied."""

    def __init__(self, kept: list[Tensor], *arguments: Any) -> None:
        super().__init__(*arguments)
        self._kept = kept
        self._is_kept = bool(kept)

    def _run_quantum(self, wait: bool) -> None:
        if not self._is_kept:
            super()._run_quantum(wait)
            return
        [prompt] = self.prompts
        prompt.rows.copy_(self._kept[self._layer])
        self._finish_layer()
        self._settle()

    def _finish_layer(self) -> None:
        if not self._is_kept:
            self._kept.append(self.prompts[0].rows.clone())
        super()._finish_layer()


def _budget(budget: float | int) -> Budget:
    return Budget(share=budget) if isinstance(budget, float) else Budget(tokens=budget)
