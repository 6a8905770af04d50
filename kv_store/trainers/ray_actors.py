"""Trainers as Ray actors of low priority that map the same arena; the calls carry offsets only."""

from __future__ import annotations

import os
import queue
from concurrent.futures import Future
from typing import Any

import faiss
import ray
import ray.exceptions

from carrel.process.ready_threads import ReadyThreads
from kv_store.client.errors import StoreError
from kv_store.client.handoff import ArenaHandle, receive_arena
from kv_store.errors import ConfigError, TrainingFailed
from kv_store.trainers.task import TrainerPool, TrainOutcome, TrainTask, run_task

_START_TIMEOUT_SECONDS = 120.0
_MAP_TIMEOUT_SECONDS = 10.0
# Training takes what is left of the cores; the store and the worker beside it are waited for.
_NICENESS = 15


class TrainerActor:
    """One trainer process. Ray restarts it; a restart maps the arena again."""

    def __init__(self, handle: ArenaHandle, arena_socket: str) -> None:
        os.setpriority(os.PRIO_PROCESS, 0, max(_NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))
        faiss.omp_set_num_threads(1)
        self._arena = receive_arena(arena_socket, handle, _MAP_TIMEOUT_SECONDS)

    def ready(self) -> bool:
        """True once the arena is mapped."""
        return bool(self._arena.size)

    def run(self, task: TrainTask) -> TrainOutcome:
        """Fit and write the arrays into the arena."""
        return run_task(self._arena, task)


class RayTrainers(TrainerPool):
    """`num_trainers` actors; a thread for each waits for its answers. They end with their owner."""

    def __init__(self, handle: ArenaHandle, num_trainers: int, arena_socket: str) -> None:
        # Ray counts no core for a trainer: the store has asked for the cores, of its placement group where it has one.
        actor_class = ray.remote(TrainerActor).options(num_cpus=0, max_restarts=-1, max_task_retries=1)
        self._actors: list[Any] = [actor_class.remote(handle, arena_socket) for _ in range(num_trainers)]
        self._idle: queue.SimpleQueue = queue.SimpleQueue()
        self._threads = ReadyThreads(num_trainers, "trainer")
        try:
            ray.get([actor.ready.remote() for actor in self._actors], timeout=_START_TIMEOUT_SECONDS)
        except (ray.exceptions.RayError, StoreError) as exc:
            self.close()
            raise ConfigError(f"--trainers {num_trainers}: the trainer actors did not start: {exc}") from exc
        for actor in self._actors:
            self._idle.put(actor)

    def submit(self, task: TrainTask) -> Future[TrainOutcome]:
        return self._threads.submit(self._run, task)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for actor in self._actors:
            ray.kill(actor)

    def _run(self, task: TrainTask) -> TrainOutcome:
        # As many threads as actors: one is always idle here.
        actor = self._idle.get()
        try:
            return ray.get(actor.run.remote(task))
        except ray.exceptions.RayTaskError as exc:
            if isinstance(exc.cause, StoreError):
                raise exc.cause from exc
            raise TrainingFailed(f"the index could not be fitted: {exc.cause}") from exc
        except ray.exceptions.RayError as exc:
            raise TrainingFailed("a trainer actor died while it fitted an index") from exc
        finally:
            self._idle.put(actor)
