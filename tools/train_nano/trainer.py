"""The training loop: phases of growing context, two optimisers, checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tools.train_nano.config import Phase, Recipe
from tools.train_nano.model import Llama
from tools.train_nano.producers import Batch, Producers
from tools.train_nano.samples import ANSWER, IGNORED

LOG_STEPS = 25


@dataclass
class Progress:
    """Where the run stands: the next step of a phase, and the seconds spent in that phase."""

    phase: int = 0
    step: int = 0
    seconds: float = 0.0


def head_loss(hidden: Tensor, weight: Tensor, targets: Tensor, weights: Tensor, is_answer: Tensor) -> Tensor:
    """Weighted mean cross-entropy of hidden [N, D] under tied weight [V, D], and the mean over answers: float32 [2]."""
    losses = F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="none")
    answers = (losses * is_answer).sum() / is_answer.sum().clamp(min=1)
    return torch.stack([(losses * weights).sum() / weights.sum(), answers])


def _fast_attention(device: torch.device) -> AbstractContextManager[None]:
    """Prefers cuDNN's attention on a GPU, the fastest in training there."""
    if device.type != "cuda":
        return nullcontext()
    return sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True)


class Trainer:
    """Trains a model by a recipe; `watch` is called with the model's phase after each."""

    def __init__(self, recipe: Recipe, model: Llama, device: torch.device, folder: Path) -> None:
        self.recipe, self.model, self.device, self.folder = recipe, model.to(device), device, folder
        matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and name.startswith("layers.")]
        others = [
            p for name, p in model.named_parameters() if not (p.ndim == 2 and name.startswith("layers."))
        ]
        self.optimizers = [
            torch.optim.Muon(matrices, lr=recipe.muon_lr, momentum=0.95, weight_decay=0.01),
            torch.optim.AdamW(others, lr=recipe.adamw_lr, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self.base_lrs = [recipe.muon_lr, recipe.adamw_lr]
        self.progress = Progress()
        self.num_steps = 0  # since the optimisers were made or restored
        self.head_loss: Callable[..., Tensor] = head_loss
        if device.type == "cuda":
            self.head_loss = torch.compile(head_loss, dynamic=False)
            for layer in model.layers:
                layer.compile(dynamic=False)

    def run(self, producers: Producers, watch: Callable[[int], None]) -> None:
        """Trains from where the progress stands to the end of the recipe."""
        for place in range(self.progress.phase, len(self.recipe.phases)):
            with _fast_attention(self.device):
                self._run_phase(place, producers)
            self.progress = Progress(place + 1)
            self.save()
            watch(place)

    def save(self) -> None:
        """Writes the checkpoint, replacing the last one."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "progress": vars(self.progress),
        }
        part = self.folder / "checkpoint.part"
        torch.save(state, part)
        part.replace(self.folder / "checkpoint.pt")

    def resume(self) -> None:
        """Continues from the checkpoint in the folder."""
        state = torch.load(self.folder / "checkpoint.pt", map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.progress = Progress(**state["progress"])

    def _run_phase(self, place: int, producers: Producers) -> None:
        phase, progress = self.recipe.phases[place], self.progress
        began = last_save = last_log = time.monotonic()
        before, waited, fetched = progress.seconds, 0.0, time.monotonic()
        for batch in producers.batches(place, progress.step):
            waited += time.monotonic() - fetched
            losses = self._step(phase, batch, self._lr_share(place))
            progress.step += 1
            progress.seconds = before + time.monotonic() - began
            if progress.step % LOG_STEPS == 0 or progress.step == phase.num_steps:
                loss, answer_loss = losses.tolist()
                now = time.monotonic()
                speed = LOG_STEPS * self.recipe.tokens_per_step / (now - last_log) / 1e6
                print(
                    f"{phase.context:>6} step {progress.step:>5}/{phase.num_steps} {progress.seconds:6.1f} s "
                    f"loss {loss:.3f} answers {answer_loss:.4f} {speed:.2f} Mtok/s "
                    f"waiting {waited / (now - last_log):.0%}",
                    flush=True,
                )
                last_log, waited = now, 0.0
            if progress.seconds > phase.max_seconds:
                print(f"{phase.context:>6} ends early: {phase.max_seconds} s are over", flush=True)
                return
            if time.monotonic() - last_save > self.recipe.checkpoint_seconds:
                self.save()
                last_save = time.monotonic()
            fetched = time.monotonic()

    def _step(self, phase: Phase, batch: Batch, lr_share: float) -> Tensor:
        recipe = self.recipe
        ids = torch.from_numpy(batch.token_ids.astype("int64")).to(self.device, non_blocking=True)
        classes = torch.from_numpy(batch.classes).to(self.device, non_blocking=True).int().roll(-1, 1)
        classes[:, -1] = IGNORED
        table = torch.tensor(
            [0.0, phase.text_weight, recipe.aside_weight, recipe.answer_weight], device=self.device
        )
        on_cuda = self.device.type == "cuda"
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=on_cuda):
            hidden = self.model(ids, torch.bfloat16 if on_cuda else torch.float32).flatten(0, 1)
            losses = self.head_loss(
                hidden,
                self.model.embed_tokens.weight,
                ids.roll(-1, 1).flatten(),
                table[classes].flatten(),
                (classes == ANSWER).flatten(),
            )
        losses[0].backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, base in zip(self.optimizers, self.base_lrs, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = base * lr_share
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return losses.detach()

    def _lr_share(self, place: int) -> float:
        """Warm-up of fresh optimisers, then linear from phase start to phase end."""
        phase, progress = self.recipe.phases[place], self.progress
        done = max(progress.step / phase.num_steps, progress.seconds / phase.max_seconds)
        share = phase.lr[0] + (phase.lr[1] - phase.lr[0]) * min(1.0, done)
        self.num_steps += 1
        return share * min(1.0, self.num_steps / self.recipe.warmup_steps)
