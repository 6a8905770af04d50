"""Processes that a replica starts on its node: a store actor and a worker process."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from typing import Any

import ray
import ray.exceptions
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from carrel.cluster.options import ClusterOptions
from carrel.errors import ChildError, ReplicaStartError
from carrel.process.events import Progress
from carrel.process.options import OptionError
from carrel.process.settings import Resolved, validate
from carrel.serve.background import Background
from carrel.serve.children import STORE_START_S, child_environment, worker_spec
from carrel.serve.display import Listener
from carrel.serve.endpoints import Endpoints, runtime_dir
from carrel.serve.model import find_model
from carrel.serve.slab_size import default_slab_bytes
from kv_store.actor import MAX_CONCURRENCY, StoreActor
from kv_store.config import StoreConfig

STORE_BUNDLE = 1
STORE_STOP_S = 10.0

log = logging.getLogger(__name__)


class _Logged(Listener):
    """Logs what the worker writes, and the stages that it has finished."""

    def progress(self, child: str, progress: Progress) -> None:
        if progress.done == progress.total:
            log.info("%s: %s", child, progress.stage)

    def line(self, child: str, text: str) -> None:
        log.warning("%s: %s", child, text)


class ReplicaServices:
    """Serving when constructed, until `close`; nothing is left when the constructor raises ReplicaStartError.

    The store is an actor in the second bundle of the replica's placement group, so on this node, and ends with the
    replica, which owns it. Its trainers are actors of low priority, which the store owns. Ray restarts the store; the
    worker then attaches to it again. `on_worker_death` is called with the reason when the worker ends by itself.
    """

    def __init__(self, resolved: Resolved[ClusterOptions], on_worker_death: Callable[[str], None]) -> None:
        options = resolved.options
        # Ray's count of an actor's cores is bookkeeping; the worker would take the whole machine's
        texts = {"threads": str(max(1, int(options.cpus))), **resolved.texts}
        with contextlib.ExitStack() as stack:
            self.endpoints = Endpoints(stack.enter_context(runtime_dir()), "127.0.0.1", 0, 0)
            self.store = start_store(store_config(resolved, self.endpoints), options.store_cpus)
            stack.callback(stop_store, self.store)
            await_store(self.store)
            spec = worker_spec(find_model(options.model), texts, self.endpoints)
            self.worker = Background(
                (spec,), child_environment(os.environ), _Logged(), lambda error: on_worker_death(_told(error))
            )
            stack.callback(self.worker.stop)
            try:
                self.worker.wait_ready()
            except ChildError as error:
                raise ReplicaStartError(_told(error)) from error
            self._stack = stack.pop_all()

    def close(self) -> None:
        """Drain the worker, end it and the store, and remove the folder of their sockets. May be called twice."""
        self._stack.close()


def _told(error: ChildError) -> str:
    """The text of an error of the worker, with its last lines."""
    return ": ".join(filter(None, [f"the {error}", "\n".join(error.lines)]))


def store_config(resolved: Resolved[ClusterOptions], endpoints: Endpoints) -> StoreConfig:
    """Raises ReplicaStartError for options that the store cannot use."""
    options = resolved.options
    wired = {"listen": f"unix:{endpoints.store_socket}", "runtime": "ray"}
    if options.arena_bytes is not None:
        # Ray gives a replica so many bytes, not slabs; a smaller slab of a small model divides these
        wired["arena_bytes"] = str(options.arena_bytes // options.slab_bytes * options.slab_bytes)
    cores = {"num_trainers": str(max(1, int(options.store_cpus)))}
    try:
        slab = {"slab_bytes": str(default_slab_bytes(find_model(options.model), options.revision))}
        return validate(StoreConfig, {**cores, **slab, **resolved.texts, **wired})
    except OptionError as exc:
        raise ReplicaStartError(str(exc)) from exc


def start_store(config: StoreConfig, num_cpus: float) -> Any:
    """The store's actor, in this replica's placement group where there is one."""
    group = ray.util.get_current_placement_group()
    strategy = "DEFAULT" if group is None else PlacementGroupSchedulingStrategy(group, STORE_BUNDLE, True)
    # Any: Ray makes an actor's methods at run time
    actor_class: Any = ray.remote(StoreActor)
    return actor_class.options(
        num_cpus=num_cpus, max_restarts=-1, max_concurrency=MAX_CONCURRENCY, scheduling_strategy=strategy
    ).remote(config)


def await_store(store: Any) -> None:
    """Raises ReplicaStartError when it does not serve."""
    try:
        ray.get(store.ready.remote(), timeout=STORE_START_S)
    except ray.exceptions.RayTaskError as exc:
        raise ReplicaStartError(f"the store cannot start: {exc.cause}") from exc
    except ray.exceptions.RayError as exc:
        raise ReplicaStartError(f"the store did not start: {type(exc).__name__}") from exc


def stop_store(store: Any) -> None:
    with contextlib.suppress(ray.exceptions.RayError):
        ray.get(store.stop.remote(), timeout=STORE_STOP_S)
    ray.kill(store)
