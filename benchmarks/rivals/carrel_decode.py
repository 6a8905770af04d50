"""Carrel's own decode step with random weights, without the service around it."""

from __future__ import annotations

import torch

from benchmarks.errors import NotMeasurable
from benchmarks.records import DecodeCase, DecodeFigures, PrefillCase, PrefillFigures
from benchmarks.rivals.decode_base import DecodeRival, PrefillRival
from benchmarks.shapes import ModelShape


def decode(shape: ModelShape, device: torch.device) -> DecodeRival:
    return CarrelDecode(shape, device)


def prefill(shape: ModelShape, device: torch.device) -> PrefillRival:
    return CarrelPrefill(shape, device)


class CarrelDecode(DecodeRival):
    """The seam: `measure` fills caches, index and arena at random and times the engine's step."""

    def __init__(self, shape: ModelShape, device: torch.device) -> None:
        self._shape, self._device = shape, device

    def measure(self, case: DecodeCase) -> DecodeFigures:
        raise NotMeasurable("the engine's decode step cannot be measured yet")


class CarrelPrefill(PrefillRival):
    """As CarrelDecode, for prompts."""

    def __init__(self, shape: ModelShape, device: torch.device) -> None:
        self._shape, self._device = shape, device

    def measure(self, case: PrefillCase) -> PrefillFigures:
        raise NotMeasurable("the engine's prefill cannot be measured yet")
