"""Index training off the call threads: a task is some heads of one layer of one sequence."""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import Future

from kv_store.trainers.task import TrainOutcome, TrainTask


class TrainerPool(ABC):
    """Runs tasks on a fixed number of trainers, each with one CPU and one FAISS thread."""

    @abstractmethod
    def submit(self, task: TrainTask) -> Future[TrainOutcome]:
        """Queue a task. The future raises InvalidArgument for keys that are not finite, else TrainingFailed."""

    @abstractmethod
    def close(self) -> None:
        """Stop the trainers; unfinished futures fail."""
