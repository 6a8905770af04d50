"""The architectures of GGUF files that are served, and what differs in their files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BEHIND_BLOCKS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """The facts that follow from `general.architecture` of a file.

    model_type: the family that reads it.
    is_reordered: rows of queries and keys have the order of RoPE that turns neighbours, unlike the family's.
    turns_part: RoPE may turn a part of each head.
    scales_long: the file may have the factors of LongRoPE.
    names: modules of a layer that the file calls otherwise than most files do.
    """

    model_type: str
    is_reordered: bool = False
    turns_part: bool = False
    scales_long: bool = False
    names: Mapping[str, str] = field(default_factory=dict)

    def module(self, stem: str) -> str | None:
        """Return the checkpoint's module of a layer's tensors; None where the family has no such module."""
        return self.names.get(stem, _LAYER_NAMES.get(stem))


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", is_reordered=True),
    "mistral": Architecture("mistral", is_reordered=True),
    # a Mistral too, whose queries do not grow
    "mistral3": Architecture("ministral3", is_reordered=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    # the text of models whose vision has a file of its own
    "qwen2vl": Architecture("qwen2"),
    "qwen3vl": Architecture("qwen3"),
    "ernie4_5": Architecture("ernie4_5"),
    "granite": Architecture("granite", is_reordered=True),
    "smollm3": Architecture("smollm3", is_reordered=True),
    "arcee": Architecture("arcee", is_reordered=True),
    "olmo2": Architecture("olmo2", names=_BEHIND_BLOCKS),
    "exaone4": Architecture("exaone4", names=_BEHIND_BLOCKS),
    "hunyuan-dense": Architecture(
        "hunyuan_v1_dense",
        names={"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
    ),
    "seed_oss": Architecture("seed_oss", names={"post_attention_norm": "post_attention_layernorm"}),
    "phi3": Architecture(
        "phi3",
        turns_part=True,
        scales_long=True,
        names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    ),
    "glm4": Architecture(
        "glm4",
        turns_part=True,
        names={
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        },
    ),
}
