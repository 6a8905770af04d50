"""From a model directory, hub id or GGUF file to a decoder whose weights are on the device."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Literal

import torch
from huggingface_hub import snapshot_download, try_to_load_from_cache

from gpu_worker.errors import ModelError
from gpu_worker.layers import Block, WeightFormat, checkpoint_parts, linear_modules
from gpu_worker.models.checkpoint import Checkpoint
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.decoder import Decoder
from gpu_worker.models.formats.made import MadeFp8, MadeInt4
from gpu_worker.models.gguf_checkpoint import GGUFCheckpoint
from gpu_worker.models.read_config import gguf_head, read_config

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
# nested folders hold other formats of the same weights, as does consolidated.safetensors
_OTHER_FORMATS = ["*/*", "consolidated*"]

# By name, how plain matrices are quantised while they are read.
QUANTIZATIONS: Mapping[str, WeightFormat] = {each.quantization: each for each in (MadeFp8(), MadeInt4())}
Formats = Mapping[str, WeightFormat]

LoadFormat = Literal["safetensors", "dummy"]
# (tensors done, tensors in all)
Progress = Callable[[int, int], None]

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_DUMMY_SEED = 0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    """A decoder ready to run. `source` is its directory or file; a tied head counts once in `num_parameters`."""

    config: ModelConfig
    decoder: Decoder
    num_parameters: int
    source: str


def load_model(
    path_or_id: str,
    *,
    device: torch.device | str,
    dtype: torch.dtype | None,
    revision: str | None = None,
    load_format: LoadFormat = "safetensors",
    download_dir: str | None = None,
    max_model_len: int | None = None,
    overrides: Mapping[str, object] | None = None,
    progress: Progress | None = None,
    quantization: str | None = None,
) -> LoadedModel:
    """Load a model's weights onto `device`; at most one matrix of the checkpoint is held at a time, and an embedding
    and a head that are compared.

    quantization: a name of QUANTIZATIONS: the matrices of projections are quantised so while they are read. None: they
    stay as they are stored.
    `dtype` None means the one config.json names, or float32; of a GGUF file that of its matrices, or bfloat16 where
    they are quantised. `load_format` "dummy" needs no more than config.json and makes seeded random weights on the
    device, none on the meta device. `max_model_len` bounds the contexts that will be served; None: all that the model
    can. `overrides`: fields of config.json with other values. Everything that can be checked without reading weights is
    checked before any memory is taken. Raises ModelError.
    """
    if load_format not in ("safetensors", "dummy"):
        raise ModelError(f"load format {load_format!r} is not supported; supported: dummy, safetensors")
    is_dummy = load_format == "dummy"
    source = resolve_source(
        path_or_id, revision=revision, download_dir=download_dir, with_weights=not is_dummy
    )
    config = read_config(source, overrides).served_up_to(max_model_len)
    checkpoint, formats = None, _made_formats(config, quantization)
    if not is_dummy:
        checkpoint = _open(source, config)
        config = config.named_as(checkpoint.names())
        formats = _checked_formats(checkpoint, config, quantization)
        config = _settle_head(checkpoint, config, formats)
    decoder = _allocate(config, torch.device(device), dtype or checkpoint_dtype(config), formats)
    if checkpoint is not None:
        _fill(decoder, checkpoint, progress)
        _check_finite(decoder, checkpoint)
    elif decoder.device.type != "meta":
        _fill_random(decoder, progress)
    return LoadedModel(config, decoder, decoder.num_parameters, str(source))


def check_model(
    path_or_id: str,
    *,
    revision: str | None,
    load_format: LoadFormat,
    download_dir: str | None = None,
    overrides: Mapping[str, object] | None = None,
    quantization: str | None = None,
) -> ModelConfig | None:
    """Check what `load_model` checks before it takes memory: configuration, names, shapes and types of the weights.

    Downloads nothing: None for a model of the hub that is not in its cache. Raises ModelError.
    """
    is_dummy, source = load_format == "dummy", Path(path_or_id).expanduser()
    if not source.exists():
        cached = try_to_load_from_cache(path_or_id, "config.json", download_dir, revision)
        if not isinstance(cached, str):
            return None
        source = Path(cached).parent
    config = read_config(source, overrides)
    # of a model of the hub, weights may still have to come
    if not is_dummy and Path(path_or_id).expanduser().exists():
        checkpoint = _open(source, config)
        _checked_formats(checkpoint, config.named_as(checkpoint.names()), quantization)
    return config


def _open(source: Path, config: ModelConfig) -> Checkpoint | GGUFCheckpoint:
    return GGUFCheckpoint(gguf_head(source), config) if source.is_file() else Checkpoint(source)


def _made_formats(config: ModelConfig, quantization: str | None) -> Formats:
    """The formats of all projections of a model that is stored plain and quantised in this way."""
    if quantization is None:
        return {}
    if quantization not in QUANTIZATIONS:
        raise ModelError(
            f"quantization {quantization!r} is not supported; supported: {', '.join(QUANTIZATIONS)}"
        )
    plain = Decoder(config, torch.device("meta"), torch.float32)
    return dict.fromkeys(linear_modules(plain), QUANTIZATIONS[quantization])


def _checked_formats(
    checkpoint: Checkpoint | GGUFCheckpoint, config: ModelConfig, quantization: str | None
) -> Formats:
    """Find the formats of the weights. Raises ModelError unless every tensor is used or needless. Takes no memory."""
    found = checkpoint.formats()
    formats = found.named or _made_formats(config, quantization)
    if quantization and (others := {each.quantization for each in formats.values()} - {quantization}):
        raise ModelError(
            f"the weights are quantised as {', '.join(sorted(others))} already, and cannot become {quantization}; "
            "leave out --quantization, or give the unquantised model"
        )
    if _has_head(checkpoint, config, formats):
        config = replace(config, tie_word_embeddings=False)
    # RoPE's frequencies follow from the configuration
    needless = frozenset(
        name
        for name in checkpoint.names()
        if name.endswith(".rotary_emb.inv_freq") or name.startswith(config.skipped)
    )
    decoder = Decoder(config, torch.device("meta"), torch.float32, formats=formats)
    parts = {name: part for name, (_, part) in checkpoint_parts(decoder).items()}
    try:
        checkpoint.check(parts, (needless | found.needless) - parts.keys())
    except ModelError as exc:
        if found.unknown:
            raise ModelError(found.unknown) from exc
        raise
    return formats


def _has_head(checkpoint: Checkpoint | GGUFCheckpoint, config: ModelConfig, formats: Formats) -> bool:
    return config.head in checkpoint.names() or config.head.removesuffix(".weight") in formats


def _settle_head(
    checkpoint: Checkpoint | GGUFCheckpoint, config: ModelConfig, formats: Formats
) -> ModelConfig:
    """Untie a head of the checkpoint's own, as transformers does whatever the config says."""
    if not config.tie_word_embeddings or not _has_head(checkpoint, config, formats):
        return config
    modules = {name.removesuffix(".weight") for name in (config.embedding, config.head)}
    if not modules & formats.keys():
        both = dict(checkpoint.tensors(frozenset({config.embedding, config.head})))
        if torch.equal(both[config.embedding], both[config.head]):
            return config
    logger.warning(
        "config.json ties the output head to the embedding, but the weights have an lm_head.weight that differs: it is "
        "used. Set tie_word_embeddings to false to silence this"
    )
    return replace(config, tie_word_embeddings=False)


def checkpoint_dtype(config: ModelConfig) -> torch.dtype:
    """The type that the checkpoint names, or float32. Raises ModelError for one that cannot be computed in."""
    name = config.checkpoint_dtype or "float32"
    if name not in _DTYPES:
        raise ModelError(f"config.json says dtype {name!r}; choose one of {', '.join(_DTYPES)} yourself")
    return _DTYPES[name]


def _allocate(config: ModelConfig, device: torch.device, dtype: torch.dtype, formats: Formats) -> Decoder:
    try:
        return Decoder(config, device, dtype, formats=formats)
    except RuntimeError as exc:
        raise ModelError(f"no memory for the weights on {device} in {dtype}: {exc}") from exc


def _fill(decoder: Decoder, checkpoint: Checkpoint | GGUFCheckpoint, progress: Progress | None) -> None:
    parts = checkpoint_parts(decoder)
    for done, (name, tensor) in enumerate(checkpoint.tensors(frozenset(parts)), start=1):
        block, _ = parts[name]
        block.load(name, tensor)
        if progress is not None:
            progress(done, len(parts))


def _check_finite(decoder: Decoder, checkpoint: Checkpoint | GGUFCheckpoint) -> None:
    """Raise ModelError for weights, or scales of packed ones, that are not finite in the decoder's type: one pass over
    them where they are, and one wait."""
    found = checkpoint_parts(decoder)
    blocks = {block: name for name, (block, _) in found.items()}
    if _are_finite((each for block in blocks for each in block.floats()), decoder.dtype):
        return
    stored = (
        name
        for name, tensor in checkpoint.tensors(frozenset(found))
        if tensor.is_floating_point() and not _are_finite([tensor.to(decoder.dtype)], decoder.dtype)
    )
    # scales within bytes, and products of numbers and scales that are finite
    unpacked = (
        f"{name}, or another matrix of the same product,"
        for block, name in blocks.items()
        if not _are_finite(block.floats(), decoder.dtype)
    )
    raise ModelError(
        f"{next(chain(stored, unpacked))} has values that are not finite in "
        f"{str(decoder.dtype).removeprefix('torch.')}: every answer would be NaN. Download the weights again, or give "
        "--dtype bfloat16 where float16 is too small"
    )


def _are_finite(tensors: Iterable[torch.Tensor], dtype: torch.dtype) -> bool:
    # NaN is both ends of its tensor; a mask would take memory, and a sum may overflow
    ends = [end.to(dtype) for each in tensors for end in torch.aminmax(each)]
    return bool(torch.stack(ends).isfinite().all())


def _fill_random(decoder: Decoder, progress: Progress | None) -> None:
    generator = torch.Generator(decoder.device).manual_seed(_DUMMY_SEED)
    blocks = [module for module in decoder.modules() if isinstance(module, Block)]
    for done, block in enumerate(blocks, start=1):
        block.fill(generator)
        if progress is not None:
            progress(done, len(blocks))


def resolve_source(
    path_or_id: str, *, revision: str | None, download_dir: str | None, with_weights: bool
) -> Path:
    """The model's directory or GGUF file; of a hub id, JSON and (`with_weights`) safetensors, from cache or network.

    What exists wins over a hub id, and `revision` and `download_dir` mean nothing to it.
    HF_HUB_OFFLINE, HF_HOME and HF_TOKEN are respected. ModelError names the id and what to do.
    """
    path = Path(path_or_id).expanduser()
    if path.exists():
        return path
    if not _HUB_ID.fullmatch(path_or_id):
        raise ModelError(
            f"{path_or_id} is no directory or GGUF file, nor the id of a model such as 'org/name'"
        )
    try:
        directory = snapshot_download(
            path_or_id,
            revision=revision,
            cache_dir=download_dir,
            allow_patterns=["*.json", "*.safetensors"] if with_weights else ["*.json"],
            ignore_patterns=_OTHER_FORMATS,
        )
    # the hub client's HTTP stack differs between its versions, and each has errors of its own
    except Exception as exc:
        at = f" at revision {revision!r}" if revision else ""
        raise ModelError(
            f"{path_or_id!r} is no local directory, and as a Hugging Face id{at} it cannot be downloaded "
            f"({type(exc).__name__}). Check the name, the network and HF_HUB_OFFLINE; set HF_TOKEN for a "
            "gated model; or download it elsewhere and give its directory"
        ) from exc
    return Path(directory)
