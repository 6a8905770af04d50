"""The projections of an attention, and what the attention between tokens must know of its layer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from gpu_worker.kernels.rope import rope
from gpu_worker.layers.block import Module, Target, Whole
from gpu_worker.layers.head_norms import HeadNorms, NormsInRope
from gpu_worker.layers.linear import Linear, LinearSpec
from gpu_worker.layers.rope import Rope, RopeSpec


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """A layer's attention.

    qkv: the projection to all query heads, then key heads, then value heads.
    output: the projection of all query heads.
    scale: multiplies q·k before the softmax.
    rope: None for a layer whose heads are not turned.
    head_norms: modules of the norms of queries and keys.
    norms: what these norm, and when.
    window: last tokens that a query attends, itself included; None for all.
    sinks: the tensor with a logit for each query head, which takes part in the softmax without a value.
    soft_cap: c of c * tanh(logit / c), applied to logits before the softmax.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv: LinearSpec
    output: LinearSpec
    scale: float
    rope: RopeSpec | None
    head_norms: tuple[str, str] | None = None
    norms: type[HeadNorms] = NormsInRope
    window: int | None = None
    sinks: str | None = None
    soft_cap: float | None = None

    def for_length(self, max_len: int) -> AttentionSpec:
        """Return the attention of a server whose longest context this is."""
        return self if self.rope is None else replace(self, rope=self.rope.for_length(max_len))

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads


class Attention(Module):
    """A rank's heads: everything but the attention between tokens.

    prefix: the layer's.
    eps: of the norms of heads.
    """

    def __init__(self, spec: AttentionSpec, prefix: str, rope: Rope, eps: float, target: Target) -> None:
        super().__init__()
        ours, shared = (target.rank.of(num, "heads") for num in (spec.num_heads, spec.num_kv_heads))
        self._num_heads, self._num_kv_heads = ours.stop - ours.start, shared.stop - shared.start
        self.rope = rope
        self.qkv = Linear(spec.qkv, prefix, target)
        names = (prefix + spec.head_norms[0], prefix + spec.head_norms[1]) if spec.head_norms else None
        heads = self._num_heads, self._num_kv_heads
        self.head_norms = spec.norms(names, heads, spec.head_dim, eps, target)
        self.o = Linear(spec.output, prefix, target)
        self.sinks = Whole(prefix + spec.sinks, (spec.num_heads,), target) if spec.sinks else None

    def project_qkv(
        self, inputs: Tensor, positions: Tensor, rows: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of normed hidden states; see `Decoder.project_qkv`."""
        norms = self.head_norms
        queries, keys, values = rope(
            norms.before(self.qkv.matmul(inputs)),
            self.rope.table,
            positions,
            self._num_heads,
            self._num_kv_heads,
            self.rope.interleaved,
            *norms.weights(),
            norms.eps,
            rows,
        )
        return self.rope.scale_queries(norms.after(queries, keys), positions), keys, values

    def output(self, attention: Tensor) -> Tensor:
        """Attention [T, num_heads, head_dim] to [T, hidden_size]."""
        return self.o.matmul(attention.flatten(1))
