"""The memory plans of a model, from a process of the worker's package: this one may not import it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import TypeAdapter

from carrel.errors import CarrelError, ModelNotFoundError
from carrel.process.command_line import arguments
from carrel.process.options import OptionError
from carrel.process.settings import validate
from carrel.process.sizing import Sizing
from carrel.serve.children import child_environment
from carrel.serve.model import check_hub_model, find_model
from carrel.serve.one_shot import ERROR_PREFIX
from carrel.serve.process import UNUSABLE_EXIT_CODE
from gpu_worker.config import WorkerConfig

# Required, and never used.
NOWHERE = "unix:-"


class SizingError(CarrelError):
    """The process that plans did not end well."""


def find_config(model: str | None, revision: str | None) -> str:
    """Return a model as `find_model` does, or the path of a JSON file that stands for its config.json.

    Raises ModelNotFoundError.
    """
    path = Path(model or "").expanduser()
    if path.suffix == ".json" and not path.is_dir():
        if not path.is_file():
            raise ModelNotFoundError(f"no file {path}; give a config.json, or a model's directory or id")
        return str(path.resolve())
    found = find_model(model)
    check_hub_model(found, revision)
    return found


def read_sizing(
    model: str, texts: Mapping[str, str], cards: Sequence[int], host_bytes: int | None = None
) -> Sizing:
    """Plan a worker of this model for each card.

    texts: the worker's options that were given, by field.
    cards: bytes of each GPU.
    host_bytes: host memory for caches; None: no limit.

    Raises OptionError for options and models that cannot be used, SizingError where `gpu_worker` cannot be started.
    """
    given = {**texts, "model": model, "listen": NOWHERE, "store": NOWHERE}
    # Refuses at once what the process would refuse seconds later.
    validate(WorkerConfig, given)
    own = ["--gpu", *map(str, cards), *(["--host", str(host_bytes)] if host_bytes else [])]
    command = [sys.executable, "-P", "-m", "gpu_worker.startup.sizing", *arguments(WorkerConfig, given), *own]
    environment = child_environment(os.environ)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    if done.returncode == UNUSABLE_EXIT_CODE:
        raise OptionError(last.removeprefix(ERROR_PREFIX))
    if done.returncode:
        raise SizingError(f"the memory cannot be planned: {last}. Install carrel[gpu-worker].")
    return TypeAdapter(Sizing).validate_json(done.stdout)
