"""The file of a calibration: two tensors, and the model they belong to."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from gpu_worker.calibration.observe import Observation, most_outlying
from gpu_worker.errors import ConfigError
from gpu_worker.models import ModelConfig
from gpu_worker.policies.hyper_parameters import with_options
from gpu_worker.policies.infinigen.policy import InfiniGen
from gpu_worker.policies.outlier_heads.policy import OutlierHeads
from gpu_worker.policies.retain import RetainPolicy

FORMAT = "carrel calibration 1"
REMEDY = "make it again with `carrel calibrate`"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The sizes that the calibrated and the served model must have in common."""

    model_type: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int

    @classmethod
    def of(cls, config: ModelConfig) -> ModelFacts:
        return cls(**{field.name: getattr(config, field.name) for field in fields(cls)})

    @classmethod
    def read(cls, metadata: Mapping[str, str]) -> ModelFacts:
        """Raises KeyError and ValueError."""
        sizes = {field.name: int(metadata[field.name]) for field in fields(cls) if field.name != "model_type"}
        return cls(metadata["model_type"], **sizes)

    def __str__(self) -> str:
        return (
            f"{self.model_type}, {self.num_layers} layers of {self.num_heads} heads and {self.num_kv_heads} KV heads "
            f"of size {self.head_dim}, hidden size {self.hidden_size}, vocabulary {self.vocab_size}"
        )


@dataclass(frozen=True, slots=True)
class Calibration:
    """The content of a file. model: its name when it was calibrated. outlier_scores: float32 [L, H_kv]."""

    path: str
    model: str
    facts: ModelFacts
    outlier_scores: Tensor

    def check(self, config: ModelConfig) -> None:
        """Raises ConfigError for a file of another model."""
        served = ModelFacts.of(config)
        if served != self.facts:
            raise ConfigError(
                f"--calibration {self.path} is of {self.model} ({self.facts}); this model is another ({served}): "
                f"{REMEDY}"
            )

    def skewed(self) -> InfiniGen:
        """InfiniGen by the file's skew."""
        return InfiniGen(skew_path=self.path)

    def with_outliers(
        self, inner: RetainPolicy, options: Mapping[str, str], full_layers: int
    ) -> OutlierHeads:
        """Wrap the policy with the file's outlier heads. options: texts of the wrapper's fields. Raises ValueError.

        The share is of all heads of the model; those in dense layers are whole anyway and count toward it, as the first
        layer does in the paper. `OutlierHeads` counts the layers behind them.
        """
        policy = with_options(OutlierHeads(inner, frozenset(), self.facts.num_kv_heads), options)
        outliers = frozenset(
            (layer - full_layers, head)
            for layer, head in most_outlying(self.outlier_scores, policy.share)
            if layer >= full_layers
        )
        return replace(policy, heads=outliers)


def write_calibration(
    path: Path, facts: ModelFacts, observation: Observation, about: Mapping[str, str]
) -> None:
    """Write the file, or replace it in one step. about: for the reader. Raises ConfigError if it cannot be written."""
    tensors = {"outlier_scores": observation.outlier_scores, "skew": observation.skew}
    metadata = {**about, "format": FORMAT, **{name: str(value) for name, value in asdict(facts).items()}}
    # under another name first, so that no reader ever sees half a file
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_bytes(
            save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata)
        )
        unfinished.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    finally:
        unfinished.unlink(missing_ok=True)


def read_calibration(path: str) -> Calibration:
    """Raises ConfigError for a file that is missing, damaged or not a calibration."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ConfigError(f"--calibration {path} is no file of `carrel calibrate`: {REMEDY}")
            facts = ModelFacts.read(metadata)
            scores = file.get_tensor("outlier_scores")
            skew_shape = tuple(file.get_slice("skew").get_shape())
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise ConfigError(f"--calibration {path} cannot be read ({error}): {REMEDY}") from error
    heads = (facts.num_layers, facts.num_kv_heads)
    if scores.shape != heads or skew_shape != (*heads, facts.head_dim, facts.head_dim):
        raise ConfigError(f"--calibration {path} does not hold what it says ({facts}): {REMEDY}")
    if not torch.isfinite(scores).all():
        raise ConfigError(f"--calibration {path} holds scores that are no numbers: {REMEDY}")
    return Calibration(path, metadata.get("model", "an unnamed model"), facts, scores.float())
