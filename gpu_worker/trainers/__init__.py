"""Index training on the model's device."""

from gpu_worker.trainers.device import train_index, training_bytes

__all__ = ["train_index", "training_bytes"]
