"""Settings of a model's quantisation, which its directory has in one of several places."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gpu_worker.models.config_fields import ConfigFields

# File, the field of it that has the settings ("" for the file itself), and the method where they name none.
_PLACES = (
    ("config.json", "quantization_config", ""),
    ("config.json", "compression_config", "compressed-tensors"),
    ("hf_quant_config.json", "quantization", "modelopt"),
    ("quantize_config.json", "", "gptq"),
    ("quant_config.json", "", "awq"),
)
_BLOCK = [128, 128]


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the quantisation. method: "" where no file names one. Every method raises ModelError for a field that
    is damaged."""

    method: str
    fields: ConfigFields

    @property
    def weights(self) -> ConfigFields:
        """Fields of the weights: of compressed-tensors those of its first group."""
        groups = self.fields.object("config_groups")
        first = groups.items()[:1]
        return groups.object(first[0][0]).object("weights") if first else self.fields

    def block(self) -> tuple[int, int]:
        """Rows and columns of a block of 8-bit floats."""
        fields = self.weights
        field = "block_structure" if fields.has("block_structure") else "weight_block_size"
        rows, columns = fields.integers(field, 2, _BLOCK)
        return rows, columns

    def group(self, num_columns: int, num_groups: int) -> int:
        """Columns of a group, as many in each where nothing is said; 0 for all."""
        fields = self.weights
        if num_groups == 1:
            return 0
        field = "q_group_size" if fields.has("q_group_size") else "group_size"
        return fields.integer(field, 1, num_columns, default=-(-num_columns // num_groups))

    def check_bits(self) -> None:
        """Raise ModelError where numbers are said to have other than 4 bits."""
        for field in ("bits", "w_bit", "num_bits"):
            if self.weights.has(field) and self.weights.integer(field, 1, 32) != 4:
                raise self.weights.fail(field, "4")


def read_settings(directory: Path) -> Settings:
    """Return the first settings that are found. Raises ModelError for a file that is not JSON."""
    for file, field, method in _PLACES:
        if (directory / file).exists():
            fields = ConfigFields.read(directory / file)
            if not field or fields.has(field):
                fields = fields.object(field) if field else fields
                return Settings(fields.text("quant_method", method), fields)
    return Settings("", ConfigFields({}, str(directory)))
