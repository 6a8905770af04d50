"""Models: one configurable decoder, a small file per family, and the loader."""

from __future__ import annotations

from gpu_worker.models.config import ModelConfig, RopeConfig
from gpu_worker.models.decoder import Decoder
from gpu_worker.models.digest import weights_digest
from gpu_worker.models.loader import LoadedModel, check_model, checkpoint_dtype, load_model
from gpu_worker.models.ungrouped import ungrouped

__all__ = [
    "Decoder",
    "LoadedModel",
    "ModelConfig",
    "RopeConfig",
    "check_model",
    "checkpoint_dtype",
    "load_model",
    "ungrouped",
    "weights_digest",
]
