"""One decoder layer: everything but the attention between its tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gpu_worker.layers.attention import Attention, AttentionSpec
from gpu_worker.layers.block import Module, Target
from gpu_worker.layers.mlp import MlpSpec
from gpu_worker.layers.norm import Norm, RmsNorm, added, added_and_normed, normed, scaled
from gpu_worker.layers.rope import Rope


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The blocks of a layer. Norms are modules of the checkpoint; None where the layer has none.

    eps, norm: of all its norms, and their kind.
    input_norm, mlp_norm: before the attention's and the MLP's projections.
    attention_out_norm, mlp_out_norm: of the outputs, before each is added to the hidden states.
    residual_scale: a factor on the outputs, before their norms.
    """

    eps: float
    attention: AttentionSpec
    mlp: MlpSpec
    input_norm: str | None = "input_layernorm"
    attention_out_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_out_norm: str | None = None
    residual_scale: float = 1.0
    norm: type[Norm] = RmsNorm

    def build(self, prefix: str, rope: Rope, target: Target) -> Layer:
        """Make a rank's shard of the layer; prefix: of its tensors in the checkpoint."""
        return Layer(self, prefix, rope, target)


class Layer(Module):
    """A rank's shard of a layer.

    prefix: of its tensors in the checkpoint.
    """

    def __init__(self, spec: LayerSpec, prefix: str, rope: Rope, target: Target) -> None:
        super().__init__()
        width = spec.attention.qkv.num_inputs
        self._residual_scale = spec.residual_scale
        self.attention = Attention(spec.attention, prefix, rope, spec.eps, target)
        self.mlp = spec.mlp.build(prefix, target)
        self.input_norm, self.attention_out_norm, self.mlp_norm, self.mlp_out_norm = (
            spec.norm(prefix + name, width, spec.eps, target) if name else None
            for name in (spec.input_norm, spec.attention_out_norm, spec.mlp_norm, spec.mlp_out_norm)
        )

    def project_qkv(
        self, hidden: Tensor, positions: Tensor, rows: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Decoder.project_qkv`."""
        return self.attention.project_qkv(normed(hidden, self.input_norm), positions, rows)

    def finish(self, hidden: Tensor, attention: Tensor) -> Tensor:
        """See `Decoder.finish_layer`."""
        output = scaled(self.attention.output(attention), self._residual_scale)
        # on a GPU the norm adds for nothing; a product into a new sum would be a copy of `hidden` first
        hidden, inputs = added_and_normed(hidden, output, self.attention_out_norm, self.mlp_norm)
        if self.mlp_out_norm is None and self._residual_scale == 1.0:
            return self.mlp.output_onto(hidden, inputs)
        output = scaled(self.mlp.output(inputs), self._residual_scale)
        return added(hidden, output, self.mlp_out_norm)


@dataclass(frozen=True, slots=True)
class ParallelLayerSpec(LayerSpec):
    """A layer whose MLP reads what its attention reads: `input_norm` of the hidden states. It has no other norm, and no
    scale."""

    mlp_norm: str | None = None

    def build(self, prefix: str, rope: Rope, target: Target) -> Layer:
        return ParallelLayer(self, prefix, rope, target)


class ParallelLayer(Layer):
    """A rank's shard of such a layer."""

    def finish(self, hidden: Tensor, attention: Tensor) -> Tensor:
        # once more instead of kept from the projection to here, with the attention of a whole prompt between
        inputs = normed(hidden, self.input_norm)
        return self.mlp.output_onto(hidden + self.attention.output(attention), inputs)
