"""Indexes trained where the model runs, from keys that need not leave the device."""

from gpu_worker.trainers.device import train_index, training_bytes

__all__ = ["train_index", "training_bytes"]
