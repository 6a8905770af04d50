"""Trainers: threads of the store's process, or Ray's actors."""

from __future__ import annotations

from concurrent.futures import Future

import faiss

from carrel.process.ready_threads import ReadyThreads
from kv_store.arena import Arena
from kv_store.client.errors import StoreError
from kv_store.errors import TrainingFailed
from kv_store.trainers.task import TrainerPool, TrainOutcome, TrainTask, run_task

__all__ = ["ThreadTrainers", "TrainOutcome", "TrainTask", "TrainerPool", "make_trainers"]


def make_trainers(runtime: str, arena: Arena, num_trainers: int, arena_socket: str) -> TrainerPool:
    """The pool of a store in this runtime, ready. `arena_socket` is where trainers of their own process get the arena.

    Raises ConfigError when they do not start.
    """
    if runtime == "process":
        return ThreadTrainers(arena, num_trainers)
    # Imported here: a store without Ray must not need it.
    from kv_store.trainers.ray_actors import RayTrainers

    return RayTrainers(arena.handle, num_trainers, arena_socket)


class ThreadTrainers(TrainerPool):
    """`num_trainers` threads over the arena's own mapping; FAISS lets go of the interpreter lock while it works."""

    def __init__(self, arena: Arena, num_trainers: int) -> None:
        self._arena = arena
        # OpenMP keeps the number of threads for each thread that calls it.
        self._threads = ReadyThreads(num_trainers, "trainer", faiss.omp_set_num_threads, (1,))

    def submit(self, task: TrainTask) -> Future[TrainOutcome]:
        return self._threads.submit(self._run, task)

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _run(self, task: TrainTask) -> TrainOutcome:
        try:
            return run_task(self._arena.data, task)
        except StoreError:
            raise
        except (RuntimeError, MemoryError, ValueError) as exc:
            raise TrainingFailed(f"the index could not be fitted: {exc}") from exc
