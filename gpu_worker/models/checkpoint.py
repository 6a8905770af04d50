"""The safetensors files of a model directory: found, checked against the model, read one tensor at a time."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Set
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from gpu_worker.errors import ModelError
from gpu_worker.layers import Part
from gpu_worker.models.config_fields import ConfigFields
from gpu_worker.models.formats.find import FoundFormats, Header, find_formats

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth")
_ADAPTER = "adapter_model.safetensors"
# The same weights in another format, which some repositories have along with the files.
_COPIES = "consolidated*"
_MAX_SHOWN = 5

logger = logging.getLogger(__name__)


class Checkpoint:
    """Tensor names and the file that holds each. Opening reads headers only; all failures are ModelError.

    A tensor that the index does not list is read from the shard that holds it. Files that are not read are logged.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[Path, list[str]] = {}
        self._headers: dict[str, Header] = {}
        if (directory / _ADAPTER).exists():
            raise ModelError(
                f"{directory} has {_ADAPTER}, and adapters are not supported: merge it into the weights (PEFT's "
                "merge_and_unload), or take it out of the directory to serve the weights without it"
            )
        promised = _promised_tensors(directory)
        for path in dict.fromkeys(promised.values() if promised else [_single_file(directory)]):
            with _open(path) as file:
                slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
                headers = {
                    name: Header(tuple(each.get_shape()), each.get_dtype()) for name, each in slices.items()
                }
            held = headers.keys()
            listed = [name for name, shard in promised.items() if shard == path]
            wanted = listed + sorted(held - promised.keys())
            absent = [name for name in listed if name not in held]
            if absent:
                raise ModelError(
                    f"{path} lacks {_shown(absent)}, which {_INDEX} says it holds; download it again"
                )
            if twice := sorted(self.names() & set(wanted)):
                raise ModelError(
                    f"{path}: {_shown(twice)} is in two files, and {_INDEX} does not say which to read"
                )
            self._files[path] = wanted
            self._headers |= {name: headers[name] for name in wanted}
        _log_unused(directory, self._files.keys())

    def check(self, parts: Mapping[str, Part], ignorable: frozenset[str]) -> None:
        """Raise ModelError unless the tensors are these, each of its shape and of a type that can be loaded."""
        check_names(str(self._directory), "config.json", self.names(), parts, ignorable)
        for path, wanted in self._files.items():
            for name in (name for name in wanted if name in parts):
                (found, dtype), part = self._headers[name], parts[name]
                if found != part.shape:
                    raise ModelError(
                        f"{path}: {name} has shape {list(found)}; config.json asks for {list(part.shape)}"
                    )
                if dtype not in part.dtypes:
                    raise ModelError(
                        f"{path}: {name} is of type {dtype}, which is not supported for it; "
                        f"supported: {', '.join(part.dtypes)}"
                    )

    def formats(self) -> FoundFormats:
        """Find the formats of the matrices. Raises ModelError."""
        return find_formats(self._directory, self._headers)

    def tensors(self, names: frozenset[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """These tensors, file by file, on the CPU; each is freed when the caller drops it."""
        for path, wanted in self._files.items():
            with _open(path) as file:
                for name in (name for name in wanted if name in names):
                    try:
                        tensor = file.get_tensor(name)
                    except (SafetensorError, OSError) as exc:
                        raise ModelError(
                            f"{path}: {name} cannot be read ({exc}); download the file again"
                        ) from exc
                    yield name, tensor

    def names(self) -> frozenset[str]:
        return frozenset(name for wanted in self._files.values() for name in wanted)


def check_names(
    source: str, config: str, names: Set[str], parts: Mapping[str, Part], ignorable: Set[str]
) -> None:
    """ModelError unless a source's tensors are those of the model that its `config` describes."""
    missing = [name for name in parts if name not in names]
    unexpected = sorted(names - parts.keys() - ignorable)
    if missing:
        raise ModelError(f"{source}: the weights lack {_shown(missing)}; {config} does not fit them")
    if unexpected:
        raise ModelError(f"{source}: the weights have {_shown(unexpected)}, which this model_type lacks")


def _promised_tensors(directory: Path) -> dict[str, Path]:
    """The index's map of tensor to file; empty when one file holds all."""
    if (directory / _SINGLE).exists() or not (directory / _INDEX).exists():
        return {}
    weight_map = ConfigFields.read(directory / _INDEX).object("weight_map")
    files: dict[str, Path] = {}
    for name, shard in weight_map.items():
        # a name with a folder in it could reach any file of this machine
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise weight_map.fail(name, "the name of a .safetensors file in the same directory")
        files[name] = directory / shard
    if not files:
        raise ModelError(f"{directory / _INDEX}: weight_map names no tensor; download it again")
    absent = sorted({path.name for path in files.values() if not path.exists()})
    if absent:
        raise ModelError(
            f"{directory}: {len(absent)} weight files are missing: {_shown(absent)}; download them again"
        )
    return files


def _single_file(directory: Path) -> Path:
    if (directory / _SINGLE).exists():
        return directory / _SINGLE
    found = sorted(directory.glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    if found:
        raise ModelError(
            f"{directory} has {len(found)} safetensors files but no {_INDEX}; download the index too"
        )
    if any(path for pattern in _PICKLES for path in directory.glob(pattern)):
        raise ModelError(
            f"{directory} has pickled weights only (.bin, .pt), which can run code when read; "
            "convert them with transformers' save_pretrained, which writes safetensors"
        )
    raise ModelError(f"{directory} has no .safetensors file; download the weights or use --load-format dummy")


def _log_unused(directory: Path, used: Set[Path]) -> None:
    copies = set(directory.glob(_COPIES))
    unused = sorted(path.name for path in set(directory.glob("*.safetensors")) - used - copies)
    if unused:
        weights = _shown(sorted(path.name for path in used))
        logger.warning("%s is not used: the weights are those of %s", _shown(unused), weights)


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as exc:
        raise ModelError(f"{path} is truncated or no safetensors file ({exc}); download it again") from exc


def _shown(names: list[str]) -> str:
    rest = len(names) - _MAX_SHOWN
    return ", ".join(names[:_MAX_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
