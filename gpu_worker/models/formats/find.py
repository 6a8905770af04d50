"""Find the formats in which a checkpoint stores its matrices.

Its tensors decide, module by module: a configuration may be missing, or left over. It says only what tensors cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple

from gpu_worker.errors import ModelError
from gpu_worker.layers import WeightFormat
from gpu_worker.layers.block import FLOATS
from gpu_worker.models.formats.codebook import Codebook
from gpu_worker.models.formats.fp8 import E4M3, Fp8, Granularity
from gpu_worker.models.formats.int4 import Awq, Gptq, PackQuantized
from gpu_worker.models.formats.settings import Settings, read_settings

# Of other ways to compute: inputs or the KV cache in 8 bits, with scales measured beforehand.
_NEEDLESS = (
    ".input_scale",
    ".input_scale_ub",
    ".activation_scale",
    ".k_scale",
    ".v_scale",
    ".q_scale",
    ".output_scale",
)
# Of 4-bit formats: shapes that follow from others, and orders of columns that settings deny.
_NEEDLESS_WORDS = (".weight_shape", ".g_idx", ".weight_g_idx")
SUPPORTED = (
    "fp8, fbgemm_fp8, ModelOpt's FP8, compressed-tensors' float-quantized and pack-quantized, AWQ, GPTQ, and "
    "bitsandbytes in 4 bits"
)


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
        # a family reads stacks of matrices by itself
        if make is not None and len(header.shape) == 2:
            named[module] = make(module, headers, settings)
    if not named:
        name, header = next(iter(packed.items()))
        said = f"quantised by {settings.method!r}" if settings.method else "quantised in an unknown way"
        unknown = (
            f"{directory}: the weights are {said} ({name} is of type {header.dtype}), which is not supported; "
            f"supported: {SUPPORTED}, and GGUF files"
        )
        return FoundFormats({}, unknown=unknown)
    needless = _NEEDLESS + _NEEDLESS_WORDS
    return FoundFormats(named, frozenset(name for name in headers if name.endswith(needless)))


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
    return Fp8(scale, Granularity.BLOCK, num_dims, settings.block())


def _words(module: str, headers: Mapping[str, Header], settings: Settings) -> WeightFormat:
    """AWQ or GPTQ, by the side that has the words."""
    settings.check_bits()
    words, scales = headers[f"{module}.qweight"], _scales(f"{module}.scales", headers, settings)
    num_groups, num_rows = scales.shape
    is_awq = words.shape[1] != num_rows
    known, field = (("gemm",), "version") if is_awq else (("gptq", "gptq_v2"), "checkpoint_format")
    version = settings.fields.text(field, known[0]).lower()
    if version not in known:
        raise settings.fields.fail(field, f"one of {', '.join(known)}")
    group = settings.group(words.shape[0] * (1 if is_awq else 8), num_groups)
    if is_awq:
        return Awq(group, has_zeros=True)
    has_order = f"{module}.g_idx" in headers and settings.fields.flag("desc_act", default=True)
    has_zeros = not settings.fields.flag("sym", default=False)
    return Gptq(group, has_zeros, has_order, zero_shift=int(version != "gptq_v2"))


def _pack_quantized(module: str, headers: Mapping[str, Header], settings: Settings) -> WeightFormat:
    settings.check_bits()
    scales = _scales(f"{module}.weight_scale", headers, settings)
    num_columns = 8 * headers[f"{module}.weight_packed"].shape[1]
    return PackQuantized(
        settings.group(num_columns, scales.shape[1]),
        has_zeros=f"{module}.weight_zero_point" in headers,
        has_order=f"{module}.weight_g_idx" in headers,
    )


def _codebook(module: str, headers: Mapping[str, Header], settings: Settings) -> WeightFormat:
    weight = f"{module}.weight"
    states = [name for name in headers if name.startswith(f"{weight}.quant_state.")]
    absmax, places = headers.get(f"{weight}.absmax"), headers.get(f"{weight}.nested_quant_map")
    if not states or absmax is None:
        raise ModelError(
            f"{settings.fields.where}: {weight} is of type U8, and the weights lack its quant_state or absmax; "
            f"supported: {SUPPORTED}"
        )
    of_scales = headers.get(f"{weight}.nested_absmax")
    nested = None if of_scales is None or places is None else (prod(of_scales.shape), prod(places.shape))
    state_size = prod(headers[states[0]].shape)
    return Codebook(states[0].rpartition(".")[2], state_size, prod(absmax.shape), nested)


def _scales(name: str, headers: Mapping[str, Header], settings: Settings) -> Header:
    found = headers.get(name)
    if found is None or len(found.shape) != 2 or 0 in found.shape:
        raise ModelError(f"{settings.fields.where}: the weights lack {name}, a scale for each row and group")
    return found


_MAKERS: dict[tuple[str, str], Callable[[str, Mapping[str, Header], Settings], WeightFormat]] = {
    ("weight", E4M3): _fp8,
    ("qweight", "I32"): _words,
    ("weight_packed", "I32"): _pack_quantized,
    ("weight", "U8"): _codebook,
}
