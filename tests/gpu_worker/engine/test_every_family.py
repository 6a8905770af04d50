"""Every family in the engine: greedy tokens are those of transformers, whatever happens to a request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from engine_rig import Record, Rig, request
from tiny_models import CONFIGS, random_token_ids, rival_logits, save_model

from gpu_worker.caches.layer_map import LayerMap
from gpu_worker.engine.request import Status
from gpu_worker.models import LoadedModel, load_model
from gpu_worker.models.families import FAMILIES
from gpu_worker.records import GenerationRequest
from gpu_worker.startup.assemble import arena_layout

NUM_PROMPT, NUM_TOKENS = 200, 6
# `bitkeys` selects, from all tokens but a few.
BUDGETS = {"full": 1.0, "bitkeys": NUM_PROMPT - 1}


@dataclass(frozen=True)
class Served:
    """A model and the greedy answer of transformers to a prompt."""

    model: LoadedModel
    prompt: tuple[int, ...]
    answer: list[int]

    def rig(self, **options: object) -> Rig:
        layers = LayerMap.with_full(self.model.config.num_layers, 0)
        return Rig(
            self.model,
            layers=layers,
            layout=arena_layout(self.model, layers),
            max_model_len=self.model.config.max_model_len,
            **options,  # type: ignore[arg-type]
        )


@pytest.fixture(scope="module", params=CONFIGS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    directory: Path = tmp_path_factory.mktemp("model")
    rival = save_model(CONFIGS[request.param](), directory)
    prompt = random_token_ids(NUM_PROMPT, seed=5)
    token_ids = prompt
    for _ in range(NUM_TOKENS):
        token_ids = torch.cat([token_ids, rival_logits(rival, token_ids)[-1:].argmax(-1)])
    model = load_model(str(directory), device="cpu", dtype=torch.float32)
    return Served(model, tuple(prompt.tolist()), token_ids[NUM_PROMPT:].tolist())


def asked(served: Served, policy: str) -> GenerationRequest:
    return request("one", policy, BUDGETS[policy], prompt=served.prompt, max_tokens=NUM_TOKENS)


def in_chunks(served: Served, one: GenerationRequest) -> Record:
    return served.rig(prefill_chunk=37).run(one)[0]


def after_its_prefix(served: Served, one: GenerationRequest) -> Record:
    rig = served.rig(reuses_prefixes=True, tokens_per_slab=16)
    rig.tokens(request("first", prompt=served.prompt[:128], max_tokens=1))
    record = rig.run(one)[0]
    assert record.usage.cached_tokens == 128
    return record


def preempted(served: Served, one: GenerationRequest) -> Record:
    rig = served.rig(max_num_seqs=1)
    rig.submit(one)
    rig.step_to("one", Status.DECODE, 3)
    rig.submit(replace(request("urgent", prompt=20, max_tokens=2), priority=-1))
    rig.drain()
    assert rig.engine.stats().preemptions_total == 1
    return rig.records["one"]


@pytest.mark.parametrize("policy", BUDGETS)
@pytest.mark.parametrize("happens", [in_chunks, after_its_prefix, preempted])
def test_tokens_are_those_of_transformers(
    served: Served, happens: Callable[[Served, GenerationRequest], Record], policy: str
) -> None:
    record = happens(served, asked(served, policy))
    assert record.tokens == served.answer
    assert (record.usage.attended_tokens < NUM_PROMPT) is (policy == "bitkeys")


def test_every_family_is_tried() -> None:
    assert {name.partition("-")[0] for name in CONFIGS} == {*FAMILIES}
