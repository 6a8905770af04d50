"""One decoder layer: everything but the attention between its tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from gpu_worker.kernels.rms_norm import add_normed, rms_norm
from gpu_worker.kernels.rope import rope
from gpu_worker.kernels.silu_mul import silu_mul
from gpu_worker.models.config import ModelConfig


def frozen(device: torch.device, dtype: torch.dtype, *shape: int) -> torch.nn.Parameter:
    """An uninitialised weight without gradient, to be filled by the loader."""
    return torch.nn.Parameter(torch.empty(shape, device=device, dtype=dtype), requires_grad=False)


class DecoderLayer(torch.nn.Module):
    """Weights of one layer, q/k/v fused in one matrix and gate/up in another.

    `qkv_weight` has rows of all query heads, then key heads, then value heads; `gate_up_weight` gate, then
    up.
    """

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self._config = config

        def weight(*shape: int, present: bool = True) -> torch.nn.Parameter | None:
            return frozen(device, dtype, *shape) if present else None

        hidden, mlp, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
        num_rows = (config.num_heads + 2 * config.num_kv_heads) * head_dim
        self.input_norm = frozen(device, dtype, hidden)
        self.qkv_weight = frozen(device, dtype, num_rows, hidden)
        self.qkv_bias = weight(num_rows, present=config.qkv_bias)
        self.q_norm = weight(head_dim, present=config.qk_norm)
        self.k_norm = weight(head_dim, present=config.qk_norm)
        self.o_weight = frozen(device, dtype, hidden, config.num_heads * head_dim)
        self.o_bias = weight(hidden, present=config.o_bias)
        self.post_attention_norm = weight(hidden, present=config.post_norms)
        self.mlp_norm = frozen(device, dtype, hidden)
        self.gate_up_weight = frozen(device, dtype, 2 * mlp, hidden)
        self.gate_up_bias = weight(2 * mlp, present=config.mlp_bias)
        self.down_weight = frozen(device, dtype, hidden, mlp)
        self.down_bias = weight(hidden, present=config.mlp_bias)
        self.post_mlp_norm = weight(hidden, present=config.post_norms)

    def project_qkv(
        self,
        hidden: torch.Tensor,
        rope_table: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `Decoder.project_qkv`; `rope_table` as `models.rope.rope_table` makes it."""
        config = self._config
        _, normed = rms_norm(hidden, self.input_norm, config.rms_norm_eps)
        return rope(
            F.linear(normed, self.qkv_weight, self.qkv_bias),
            rope_table,
            positions,
            config.num_heads,
            config.num_kv_heads,
            config.rope.interleaved,
            self.q_norm,
            self.k_norm,
            config.rms_norm_eps,
            rows,
        )

    def finish(self, hidden: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
        """See `Decoder.finish_layer`."""
        eps = self._config.rms_norm_eps
        out = F.linear(attention.flatten(1), self.o_weight, self.o_bias)
        # on a GPU the norm adds for nothing; a product into a new sum would be a copy of `hidden` first
        hidden, normed = rms_norm(hidden, self.mlp_norm, eps, out, self.post_attention_norm)
        activated = silu_mul(F.linear(normed, self.gate_up_weight, self.gate_up_bias))
        if self.post_mlp_norm is not None:
            out = F.linear(activated, self.down_weight, self.down_bias)
            return add_normed(hidden, out, self.post_mlp_norm, eps)
        if self.down_bias is not None:
            return hidden.add_(F.linear(activated, self.down_weight, self.down_bias))
        return hidden.addmm_(activated, self.down_weight.t())
