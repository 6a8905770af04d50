"""Find the formats in which a checkpoint stores its matrices.

Its tensors decide, module by module: a configuration may be missing, or left over. It says only what tensors cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from gpu_worker.errors import ModelError
from gpu_worker.layers import WeightFormat
from gpu_worker.layers.block import FLOATS
from gpu_worker.models.config_fields import ConfigFields
from gpu_worker.models.formats.fp8 import E4M3, Fp8, Granularity

# Of other ways to compute: inputs or the KV cache in 8 bits, with scales measured beforehand.
_NEEDLESS = (".input_scale", ".input_scale_ub", ".k_scale", ".v_scale", ".q_scale", ".output_scale")
_BLOCK = [128, 128]
# File, the field of it that has the settings ("" for the file itself), and the method where they name none.
_PLACES = (
    ("config.json", "quantization_config", ""),
    ("config.json", "compression_config", "compressed-tensors"),
    ("hf_quant_config.json", "quantization", "modelopt"),
    ("quantize_config.json", "", "gptq"),
    ("quant_config.json", "", "awq"),
)
SUPPORTED = "fp8, fbgemm_fp8, ModelOpt's FP8 and compressed-tensors' float-quantized"


class Header(NamedTuple):
    """A tensor's shape, and its type as safetensors calls it."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class FoundFormats:
    """named: by modules. needless: tensors that are not read.

    unknown: says which format the tensors have that no module's could be found for; "" where there is none. A family
        may read such tensors by itself.
    """

    named: Mapping[str, WeightFormat]
    needless: frozenset[str] = frozenset()
    unknown: str = ""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the quantisation. method: "" where no file names one."""

    method: str
    fields: ConfigFields


def find_formats(directory: Path, headers: Mapping[str, Header]) -> FoundFormats:
    """Return the formats of all matrices that are not plain. Raises ModelError for settings that are damaged."""
    packed = {name: header for name, header in headers.items() if header.dtype not in FLOATS}
    if not packed:
        return FoundFormats({})
    settings = read_settings(directory)
    named: dict[str, WeightFormat] = {}
    for name, header in packed.items():
        module, _, last = name.rpartition(".")
        make = _MAKERS.get((last, header.dtype))
        if make is not None:
            named[module] = make(module, headers, settings)
    if not named:
        name, header = next(iter(packed.items()))
        said = f"quantised by {settings.method!r}" if settings.method else "quantised in an unknown way"
        unknown = (
            f"{directory}: the weights are {said} ({name} is of type {header.dtype}), which is not supported; "
            f"supported: {SUPPORTED}, and GGUF files"
        )
        return FoundFormats({}, unknown=unknown)
    return FoundFormats(named, frozenset(name for name in headers if name.endswith(_NEEDLESS)))


def read_settings(directory: Path) -> Settings:
    """Return the first settings that are found. Raises ModelError for a file that is not JSON."""
    for file, field, method in _PLACES:
        if (directory / file).exists():
            fields = ConfigFields.read(directory / file)
            if not field or fields.has(field):
                fields = fields.object(field) if field else fields
                return Settings(fields.text("quant_method", method), fields)
    return Settings("", ConfigFields({}, str(directory)))


def _fp8(module: str, headers: Mapping[str, Header], settings: Settings) -> WeightFormat:
    for scale in ("weight_scale_inv", "weight_scale"):
        if found := headers.get(f"{module}.{scale}"):
            break
    else:
        raise ModelError(
            f"{settings.fields.where}: {module}.weight is of type {E4M3}, and the weights lack its weight_scale"
        )
    num_rows, num_dims = headers[f"{module}.weight"].shape[0], len(found.shape)
    if all(size == 1 for size in found.shape):
        return Fp8(scale, Granularity.TENSOR, num_dims)
    if num_dims == 1 or found.shape == (num_rows, 1):
        return Fp8(scale, Granularity.ROW, num_dims)
    return Fp8(scale, Granularity.BLOCK, num_dims, _block(settings))


def _block(settings: Settings) -> tuple[int, int]:
    """Rows and columns of a block: of `fp8`, of a group of compressed-tensors, or the usual ones."""
    fields, field = settings.fields, "weight_block_size"
    groups = fields.object("config_groups")
    if groups.items():
        fields, field = groups.object(groups.items()[0][0]).object("weights"), "block_structure"
    rows, columns = fields.integers(field, 2, _BLOCK)
    return rows, columns


_MAKERS: dict[tuple[str, str], Callable[[str, Mapping[str, Header], Settings], WeightFormat]] = {
    ("weight", E4M3): _fp8,
}
