"""One decoder layer: everything but the attention between its tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from gpu_worker.models.config import ModelConfig
from gpu_worker.models.rope import apply_rope


def frozen(device: torch.device, dtype: torch.dtype, *shape: int) -> torch.nn.Parameter:
    """An uninitialised weight without gradient; whoever builds the decoder fills it."""
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
        self, hidden: torch.Tensor, cos_sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `Decoder.project_qkv`; `cos_sin` [T, 2, rotary_dim]: the RoPE table's rows of the positions."""
        config = self._config
        num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
        qkv = F.linear(self._norm(hidden, self.input_norm), self.qkv_weight, self.qkv_bias)
        qkv = qkv.view(hidden.shape[0], num_heads + 2 * num_kv_heads, config.head_dim)
        query_keys, values = qkv.split((num_heads + num_kv_heads, num_kv_heads), 1)
        if self.q_norm is not None and self.k_norm is not None:
            queries, keys = query_keys.split((num_heads, num_kv_heads), 1)
            query_keys = torch.cat((self._norm(queries, self.q_norm), self._norm(keys, self.k_norm)), 1)
        query_keys = apply_rope(query_keys, cos_sin, config.rope)
        queries, keys = query_keys.split((num_heads, num_kv_heads), 1)
        return queries, keys, values

    def finish(self, hidden: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
        """See `Decoder.finish_layer`."""
        out = F.linear(attention.flatten(1), self.o_weight, self.o_bias)
        if self.post_attention_norm is not None:
            out = self._norm(out, self.post_attention_norm)
        hidden = hidden + out
        gate, up = F.linear(self._norm(hidden, self.mlp_norm), self.gate_up_weight, self.gate_up_bias).chunk(
            2, -1
        )
        out = F.linear(F.silu(gate) * up, self.down_weight, self.down_bias)
        if self.post_mlp_norm is not None:
            out = self._norm(out, self.post_mlp_norm)
        return hidden + out

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, self._config.rms_norm_eps)
