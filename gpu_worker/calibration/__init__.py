"""Calibration: what some policies need to know of a model, measured on texts and kept in a file."""

from gpu_worker.calibration.observe import Observation, observe, observe_layer
from gpu_worker.calibration.record import Calibration, ModelFacts, read_calibration, write_calibration

__all__ = [
    "Calibration",
    "ModelFacts",
    "Observation",
    "observe",
    "observe_layer",
    "read_calibration",
    "write_calibration",
]
