"""Trainer pools by name."""

from __future__ import annotations

from collections.abc import Callable

from kv_store.arena import Arena
from kv_store.errors import ConfigError
from kv_store.trainers.task import TrainerPool, TrainOutcome, TrainTask

__all__ = ["TrainOutcome", "TrainTask", "TrainerPool", "make_trainers"]


def _threads(arena: Arena, num_trainers: int, arena_socket: str) -> TrainerPool:
    from kv_store.trainers.threads import ThreadTrainers

    return ThreadTrainers(arena, num_trainers)


def _ray(arena: Arena, num_trainers: int, arena_socket: str) -> TrainerPool:
    # Imported here: a store without Ray must not need it.
    from kv_store.trainers.ray_actors import RayTrainers

    return RayTrainers(arena.handle, num_trainers, arena_socket)


_FACTORIES: dict[str, Callable[[Arena, int, str], TrainerPool]] = {"threads": _threads, "ray": _ray}


def make_trainers(kind: str, arena: Arena, num_trainers: int, arena_socket: str) -> TrainerPool:
    """The pool of this name, ready. `arena_socket` is where trainers of their own process get the arena.

    Raises ConfigError for an unknown name, listing the known ones.
    """
    factory = _FACTORIES.get(kind)
    if factory is None:
        raise ConfigError(f"trainers {kind!r}: must be one of {', '.join(_FACTORIES)}")
    return factory(arena, num_trainers, arena_socket)
