"""What a request has taken so far: times of its life, and sums over its steps."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


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


@dataclass(slots=True)
class Clock:
    """Monotonic times of a request's life, in seconds; 0 where not reached."""

    submitted: float = field(default_factory=time.monotonic)
    admitted: float = 0.0
    prefilled: float = 0.0
    indexed: float = 0.0
