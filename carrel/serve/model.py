"""Which model to serve."""

from __future__ import annotations

import json
from pathlib import Path

from carrel.errors import ModelNotFoundError
from carrel.process.gguf_file import GGUFError, read_gguf
from carrel.process.model_types import ModelTypeError, check_model_type
from carrel.process.version import CHECKOUT

BUNDLED = CHECKOUT / "models" / "carrel-nano"
# what make puts beside the bundled model when it is first asked for
FETCHED = ("smollm2",)
ASK_TIMEOUT_S = 5.0


def find_model(model: str | None, bundled: Path = BUNDLED) -> str:
    """A directory or GGUF file as an absolute path, a Hub id as it is, and the bundled model for None. What lies beside
    the bundled model may be called by its name alone.

    Raises ModelNotFoundError when the bundled model is missing, or a path leads to no model, to one of a family that is
    not served, or to a damaged file.
    """
    if model is None:
        if not (bundled / "config.json").is_file():
            raise ModelNotFoundError(
                f"no bundled model at {bundled}; name a model directory or Hub id: carrel serve MODEL"
            )
        return str(bundled)
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFoundError(f"{path} has no config.json: not a Hugging Face model directory")
        _check_family(path / "config.json")
        return str(path.resolve())
    if path.is_file():
        return _gguf_file(path)
    fetched = bundled.parent / f"{model}.gguf"
    if fetched.is_file():
        return _gguf_file(fetched)
    if model in FETCHED:
        raise ModelNotFoundError(
            f"{fetched} is not here; in a checkout `make serve MODEL={model}` fetches it"
        )
    # a Hub id is at most owner/name, and no file; anything else was meant as a path
    if (
        path.is_absolute()
        or model.startswith((".", "~"))
        or model.count("/") > 1
        or path.suffix.lower() == ".gguf"
    ):
        raise ModelNotFoundError(f"no model directory or GGUF file at {path}")
    return model


def _check_family(path: Path) -> None:
    """Raise ModelNotFoundError for a family that is not served: the worker's check, which loads PyTorch, takes seconds.

    A file that cannot be read is left to that check.
    """
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return
    try:
        check_model_type(str(path), fields if isinstance(fields, dict) else {})
    except ModelTypeError as error:
        raise ModelNotFoundError(str(error)) from error


def _gguf_file(path: Path) -> str:
    try:
        read_gguf(path)
    except GGUFError as error:
        raise ModelNotFoundError(str(error)) from error
    # not what a link leads to: a cache's names say nothing
    return str(path.absolute())


def check_hub_model(model: str, revision: str | None) -> None:
    """Ask the Hub for what `find_model` took for an id, unless it is cached, before anything is started for it.

    Raises ModelNotFoundError when the Hub has no such model or revision, or cannot be asked.
    """
    if Path(model).exists():
        return
    # imported late: help does not need it
    from huggingface_hub import HfApi, try_to_load_from_cache

    try:
        if isinstance(try_to_load_from_cache(model, "config.json", revision=revision), str):
            return
        HfApi().model_info(model, revision=revision, timeout=ASK_TIMEOUT_S)
    except Exception as exc:
        # the errors of the library's HTTP client have no base of its own
        why = " ".join(str(exc).split())
        raise ModelNotFoundError(
            f"no model directory or GGUF file {model}, and the Hugging Face hub does not give it: {why}"
        ) from exc
