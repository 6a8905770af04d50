"""The store as an actor of a Ray that this process starts for itself, on loopback, and ends."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import ray
import ray.exceptions

from carrel.process.events import ProcessEvents
from carrel.process.logs import share_stderr
from kv_store.actor import ACTOR_NAME, MAX_CONCURRENCY, NAMESPACE, StoreActor
from kv_store.arena import claim_socket_path
from kv_store.client.errors import StoreError
from kv_store.config import StoreConfig
from kv_store.errors import ConfigError
from kv_store.memory import check_room
from kv_store.runtimes import Runtime
from kv_store.runtimes.children import adopt_orphans, end_children
from kv_store.runtimes.ray_start import REMEDY, START_SECONDS, Patience, StartFailed, start_ray

# Ray appends up to 66 characters for its sockets, and a socket's path ends at 107.
_MAX_FOLDER_CHARACTERS = 40
_STOP_TIMEOUT_SECONDS = 10.0
_WATCH_SECONDS = 0.2
_READY_SECONDS = 1.0


class RayRuntime(Runtime):
    """A local Ray in a private folder, a named actor in it, and its trainers."""

    def __init__(self, config: StoreConfig, events: ProcessEvents) -> None:
        check_room(config.arena_bytes, config.slab_bytes)
        # Before anything of ours is to be cleaned up: the paths may be another store's.
        for path in _socket_paths(config):
            claim_socket_path(str(path))
        self._config = config
        self._events = events
        with contextlib.ExitStack() as stack:
            folder = _private_folder(config)
            stack.callback(_remove, folder)
            self._folder = folder
            _use_token(folder)
            adopt_orphans()
            stack.callback(end_children, _STOP_TIMEOUT_SECONDS)
            stack.callback(ray.shutdown)
            start_ray(f"{folder}/r", config.num_trainers + 1, events)
            events.progress("start the store", 0, 1)
            # Any: Ray makes an actor's methods at run time.
            actor_class: Any = ray.remote(StoreActor)
            self._actor = actor_class.options(
                name=ACTOR_NAME,
                namespace=NAMESPACE,
                num_cpus=1,
                max_restarts=config.max_restarts,
                max_concurrency=MAX_CONCURRENCY,
            ).remote(config, share_stderr())
            stack.callback(self._stop_actor)
            self._await_ready()
            events.progress("start the store", 1, 1)
            self._life = self._actor.wait.remote()
            self._stack = stack.pop_all()

    def watch(self) -> None:
        done, _ = ray.wait([self._life], timeout=_WATCH_SECONDS)
        if not done:
            return
        try:
            ray.get(self._life)
            raise StoreError("the store stopped by itself")
        except ray.exceptions.RayError as exc:
            self._events.status("the store's process died")
            if not self._config.max_restarts:
                raise StoreError("the store's process died") from exc
        self._await_ready()
        self._life = self._actor.wait.remote()
        self._events.status(
            "the store was restarted by Ray, with a new epoch and what is on its disk, if it has one"
        )

    def close(self) -> None:
        self._stack.close()

    def abandon(self) -> None:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        end_children(0.0)
        for path in _socket_paths(self._config):
            path.unlink(missing_ok=True)
        _remove(self._folder)

    def _await_ready(self) -> None:
        """Return when the actor serves. Raises StoreError when it fails, and ConfigError when it takes too long."""
        patience = Patience(self._events, "the store's actor", START_SECONDS)
        answer = self._actor.ready.remote()
        while True:
            try:
                ray.get(answer, timeout=_READY_SECONDS)
                return
            except ray.exceptions.GetTimeoutError:
                self._be_patient(patience)
            except ray.exceptions.ActorUnavailableError:
                # Ray is restarting it.
                self._be_patient(patience)
                time.sleep(_WATCH_SECONDS)
                answer = self._actor.ready.remote()
            except ray.exceptions.RayTaskError as exc:
                if isinstance(exc.cause, StoreError):
                    raise exc.cause from exc
                raise StoreError(f"the store failed to start: {exc.cause}") from exc
            except ray.exceptions.RayError as exc:
                raise StoreError("the store's process died") from exc

    def _be_patient(self, patience: Patience) -> None:
        try:
            patience.check()
        except StartFailed as error:
            raise ConfigError(f"--runtime ray: {error}; {REMEDY}") from error

    def _stop_actor(self) -> None:
        # A dead or stuck actor is ended all the same.
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(self._actor.stop.remote(), timeout=_STOP_TIMEOUT_SECONDS)
        ray.kill(self._actor)
        for path in _socket_paths(self._config):
            path.unlink(missing_ok=True)


def _socket_paths(config: StoreConfig) -> list[Path]:
    return [path for path in (config.socket_path, Path(config.arena_socket)) if path is not None]


def _private_folder(config: StoreConfig) -> str:
    """Make a 0700 folder where paths are short enough: in RAY_TMPDIR, beside the socket (the supervisor cleans there
    too), or among temporary files."""
    parents = [os.environ.get("RAY_TMPDIR", ""), tempfile.gettempdir(), "/tmp"]
    if config.socket_path is not None:
        config.socket_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        parents.insert(1, str(config.socket_path.parent))
    fits = [
        each
        for each in parents
        if each.startswith("/") and len(each) + len("/ray-12345678") <= _MAX_FOLDER_CHARACTERS
    ]
    try:
        return tempfile.mkdtemp(prefix="ray-", dir=fits[0])
    except OSError as exc:
        raise ConfigError(
            f"--runtime ray: no folder for Ray can be made in {fits[0]}: {exc.strerror}; set RAY_TMPDIR to another"
        ) from exc


def _use_token(folder: str) -> None:
    """Make this Ray's secret in its own folder; by default Ray would keep one in the user's home."""
    path = f"{folder}/token"
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    os.environ["RAY_AUTH_TOKEN_PATH"] = path


def _remove(folder: str) -> None:
    shutil.rmtree(folder)
