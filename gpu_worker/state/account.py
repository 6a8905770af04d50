"""Sums over the decode steps of a request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Meter:
    """Sums over decode steps; `usage` turns them into means."""

    num_layer_steps: int = 0
    context_tokens: int = 0
    attended_tokens: float = 0.0
    window_tokens: float = 0.0
    selected_rows: int = 0
    missed_rows: int = 0
    num_measured: int = 0
    attention_mass: float = 0.0
    recall_rate: float = 0.0
    best_recall: float = 0.0
