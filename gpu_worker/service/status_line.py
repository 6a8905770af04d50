"""One line that says what the engine is doing."""

from __future__ import annotations

from gpu_worker.records import EngineStats


def is_idle(before: EngineStats, now: EngineStats) -> bool:
    """True when nothing runs, waits, or has been done between two readings."""
    return (
        now.running == now.waiting == 0
        and before.prompt_tokens_total == now.prompt_tokens_total
        and before.generation_tokens_total == now.generation_tokens_total
    )


def status_line(before: EngineStats, now: EngineStats, seconds: float) -> str:
    """Gauges of `now`, rates between two readings `seconds` apart."""
    prompt = (now.prompt_tokens_total - before.prompt_tokens_total) / seconds
    generation = (now.generation_tokens_total - before.generation_tokens_total) / seconds
    parts = [
        f"running {now.running}, waiting {now.waiting}",
        f"prompt {prompt:.0f} tok/s, generation {generation:.0f} tok/s",
    ]
    if now.slot_capacity_tokens:
        parts.append(f"slots {100 * now.slot_used_tokens / now.slot_capacity_tokens:.0f} %")
    if selected := now.selected_rows_total - before.selected_rows_total:
        hits = now.hit_rows_total - before.hit_rows_total
        parts.append(f"hit rate {100 * hits / selected:.0f} %")
    if not now.store_reachable:
        parts.append("KV store unreachable")
    return "; ".join(parts)
