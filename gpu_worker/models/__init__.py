"""Models: the decoder, a small file per family that composes its layers, and the loader."""

from __future__ import annotations

from gpu_worker.models.config import ModelConfig
from gpu_worker.models.decoder import Decoder
from gpu_worker.models.digest import weights_digest
from gpu_worker.models.loader import LoadedModel, check_model, checkpoint_dtype, load_model
from gpu_worker.models.ungrouped import ungrouped

__all__ = [
    "Decoder",
    "LoadedModel",
    "ModelConfig",
    "check_model",
    "checkpoint_dtype",
    "load_model",
    "ungrouped",
    "weights_digest",
]
