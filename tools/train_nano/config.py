"""The recipe of `carrel-nano`: the model's shape and the phases of its training."""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the Llama-style model; names as in Hugging Face's `LlamaConfig`."""

    vocab_size: int = 8192
    hidden_size: int = 384
    intermediate_size: int = 1024
    num_hidden_layers: int = 8
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 64
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 32768


@dataclass(frozen=True)
class Phase:
    """A stretch of training at one context length, ended by its steps or its seconds, whichever come first.

    `plain` and `packed` are the shares of sequences that hold plain book text and several short documents; the
    others hold one document as long as the context. `text_weight` is the loss weight of book text (answers: 4);
    `lr` the share of the full learning rates at the phase's start and end.
    """

    context: int
    num_steps: int
    max_seconds: float
    plain: float
    packed: float
    text_weight: float
    lr: tuple[float, float]


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a training run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    phases: tuple[Phase, ...] = (
        Phase(1024, 1200, 220, plain=0.30, packed=0.70, text_weight=1.0, lr=(1.0, 1.0)),
        Phase(4096, 1700, 300, plain=0.25, packed=0.30, text_weight=0.5, lr=(1.0, 1.0)),
        Phase(16384, 1400, 470, plain=0.20, packed=0.30, text_weight=0.5, lr=(1.0, 0.6)),
        Phase(32768, 500, 300, plain=0.15, packed=0.35, text_weight=0.5, lr=(0.6, 0.02)),
        Phase(1024, 500, 80, plain=0.10, packed=0.90, text_weight=0.5, lr=(0.6, 0.6)),
        Phase(4096, 800, 150, plain=0.10, packed=0.40, text_weight=0.5, lr=(0.6, 0.4)),
        Phase(16384, 680, 230, plain=0.10, packed=0.35, text_weight=0.5, lr=(0.4, 0.12)),
        Phase(32768, 240, 140, plain=0.10, packed=0.30, text_weight=0.5, lr=(0.12, 0.01)),
    )
    tokens_per_step: int = 262_144
    muon_lr: float = 0.02
    adamw_lr: float = 2e-3
    warmup_steps: int = 100
    answer_weight: float = 4.0
    aside_weight: float = 0.2
    pool_weights: tuple[float, ...] = (
        1.0,
        1.0,
        2.0,
    )  # the training words, words of the books, invented words
    seed: int = 1
    checkpoint_seconds: float = 120.0

    def scaled(self, share: float, lr_share: float = 1.0) -> Recipe:
        """A shorter or gentler run: these shares of every phase's steps and seconds, and of the learning rates."""
        phases = tuple(
            replace(p, num_steps=max(1, round(p.num_steps * share)), max_seconds=p.max_seconds * share)
            for p in self.phases
        )
        return replace(
            self,
            phases=phases,
            warmup_steps=max(1, round(self.warmup_steps * share)),
            muon_lr=self.muon_lr * lr_share,
            adamw_lr=self.adamw_lr * lr_share,
        )

    def smoke(self) -> Recipe:
        """The same run in miniature, to see on a CPU that every part of it works."""
        model = replace(
            self.model, hidden_size=96, intermediate_size=128, num_hidden_layers=2, num_attention_heads=3
        )
        model = replace(model, num_key_value_heads=1, head_dim=64)
        phases = tuple(
            replace(phase, context=context, num_steps=4)
            for phase, context in zip(self.phases, (512, 1024, 2048, 4096) * 2, strict=True)
        )
        return replace(self, model=model, phases=phases, tokens_per_step=4096, warmup_steps=3)
