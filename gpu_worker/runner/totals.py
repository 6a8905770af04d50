"""Counters of a runner, and its gauges."""

from __future__ import annotations

from gpu_worker.records.plans import RunnerStats
from gpu_worker.runner.prompts.in_progress import Prefills
from gpu_worker.state.sequence import Sequence
from gpu_worker.state.slot_pool import SlotPool
from gpu_worker.store.kv_meter import KVMeter
from gpu_worker.store.offload import Offloader


class Totals:
    """Sums over requests since the start. num_computed: tokens of prompts that were computed."""

    def __init__(self, num_layer_heads: int) -> None:
        """num_layer_heads: KV heads of all layers."""
        self._num_layer_heads = num_layer_heads
        self.clear()

    def clear(self) -> None:
        """Count from zero again."""
        self.num_computed = self._selected_rows = self._hit_rows = 0

    def add(self, sequence: Sequence, meter: KVMeter) -> None:
        """Count what a request selected and attended, at its end."""
        own = sequence.meter
        self._selected_rows += own.selected_rows
        self._hit_rows += own.selected_rows - own.missed_rows
        if own.context_tokens:
            meter.attended.observe((own.attended_tokens + own.window_tokens) / own.context_tokens)

    def stats(self, prefills: Prefills, pool: SlotPool, offloader: Offloader, num_forced: int) -> RunnerStats:
        """num_forced: tokens of prompts that decode steps computed."""
        meter = offloader.meter
        return RunnerStats(
            prefilling=len(prefills),
            prefilling_tokens=sum(each.num_prefill for each in prefills),
            prefilling_tokens_left=prefills.left_tokens,
            prompt_tokens_total=self.num_computed + num_forced,
            slot_used_tokens=pool.num_used_slots / self._num_layer_heads,
            offloaded_bytes_total=offloader.offloaded_bytes,
            fetched_bytes_total=offloader.host.fetched_bytes,
            selected_rows_total=self._selected_rows,
            hit_rows_total=self._hit_rows,
            corrupt_segments_total=offloader.client.num_corrupt,
            store_reachable=offloader.link.is_reachable,
            index_search_seconds=meter.search.read(),
            gather_seconds=meter.gather.read(),
            h2d_copy_seconds=meter.copy.read(),
            offload_seconds=meter.offload.read(),
            decode_stall_seconds={cause.value: each.read() for cause, each in meter.stalls.items()},
            fallbacks_total={kind.value: count for kind, count in meter.fallbacks.items()},
            selected_tokens_ratio=meter.attended.read(),
        )
