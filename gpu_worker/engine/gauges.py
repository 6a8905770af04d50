"""What an engine's statistics say of now."""

from __future__ import annotations

from dataclasses import dataclass

from gpu_worker.caches import CacheSet
from gpu_worker.engine.admission.preemption import Preemption
from gpu_worker.engine.scheduler import Scheduler
from gpu_worker.records import EngineStats
from gpu_worker.runner.prompts.in_progress import Prefills
from gpu_worker.state.sequence import Sequence
from gpu_worker.state.slot_pool import SlotPool
from gpu_worker.store.offload import Offloader


@dataclass(frozen=True, slots=True)
class Gauges:
    """Read from the engine's parts. num_layer_heads: KV heads of all layers."""

    scheduler: Scheduler
    preemption: Preemption
    prefills: Prefills
    caches: CacheSet
    pool: SlotPool
    offloader: Offloader
    num_layer_heads: int

    def add_ended(self, sequence: Sequence, stats: EngineStats) -> None:
        """What a request selected and attended, at its end."""
        meter = sequence.meter
        stats.selected_rows_total += meter.selected_rows
        stats.hit_rows_total += meter.selected_rows - meter.missed_rows
        if meter.context_tokens:
            attended = meter.attended_tokens + meter.window_tokens
            self.offloader.meter.attended.observe(attended / meter.context_tokens)

    def read_into(self, stats: EngineStats) -> EngineStats:
        stats.running = self.scheduler.num_running
        stats.waiting = self.scheduler.num_waiting
        stats.waiting_tokens = self.scheduler.num_waiting_tokens
        stats.prefilling = len(self.prefills)
        stats.prefilling_tokens = sum(each.num_prefill for each in self.prefills)
        stats.prefilling_tokens_left = self.prefills.left_tokens
        stats.preemptions_total = self.preemption.num_preempted
        self.caches.recall.fetch_counts.take(self.scheduler.offloading(), wait=False)
        stats.slot_used_tokens = self.pool.num_used_slots / self.num_layer_heads
        stats.offloaded_bytes_total = self.offloader.offloaded_bytes + self.offloader.copies.copied_bytes
        stats.fetched_bytes_total = self.offloader.reads.fetched_bytes
        stats.corrupt_segments_total = self.offloader.num_corrupt
        stats.store_reachable = self.offloader.is_reachable
        meter = self.offloader.meter
        stats.index_search_seconds = meter.search.read()
        stats.gather_seconds = meter.gather.read()
        stats.h2d_copy_seconds = meter.copy.read()
        stats.offload_seconds = meter.offload.read()
        stats.decode_stall_seconds = {cause.value: each.read() for cause, each in meter.stalls.items()}
        stats.fallbacks_total = {kind.value: count for kind, count in meter.fallbacks.items()}
        stats.selected_tokens_ratio = meter.attended.read()
        return stats
