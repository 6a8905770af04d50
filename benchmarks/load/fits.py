"""Whether something grows: a straight line through what was seen of it, and how sure its slope is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

HOUR_S = 3600.0


@dataclass(frozen=True)
class Slope:
    """Growth an hour of one gauge, with its standard error (None: too few points for one); level: its mean.

    num_lives: of how many processes, one after another; each may lie as high as it likes, their slope is one.
    """

    name: str
    level: float
    per_hour: float
    error: float | None
    num_points: int
    num_lives: int


def fit(name: str, lives: Sequence[Sequence[tuple[float, float]]]) -> Slope | None:
    """Least squares over points of (seconds, value). None where no life has two points at different times."""
    lives = [life for life in lives if len(life) > 1]
    spread = product = 0.0
    for life in lives:
        middle, level = _means(life)
        spread += sum((at - middle) ** 2 for at, _ in life)
        product += sum((at - middle) * (value - level) for at, value in life)
    if spread == 0.0:
        return None
    slope = product / spread
    num_points = sum(len(life) for life in lives)
    squares = 0.0
    for life in lives:
        middle, level = _means(life)
        squares += sum((value - level - slope * (at - middle)) ** 2 for at, value in life)
    freedom = num_points - len(lives) - 1
    error = HOUR_S * math.sqrt(squares / freedom / spread) if freedom > 0 else None
    level = sum(value for life in lives for _, value in life) / num_points
    return Slope(name, level, slope * HOUR_S, error, num_points, len(lives))


def _means(life: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return sum(at for at, _ in life) / len(life), sum(value for _, value in life) / len(life)
