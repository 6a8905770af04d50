"""The sampler on a GPU gives the tokens that it gives on a CPU."""

import numpy as np
import pytest
import torch

from gpu_worker.records import SamplingParams
from gpu_worker.sampling import Sampler, SamplerState

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

KINDS = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 5},
    {"temperature": 0.0, "repetition_penalty": 1.4, "frequency_penalty": 0.3, "presence_penalty": 0.2},
    {"seed": 1},
    {"seed": 2, "top_k": 40, "temperature": 0.7},
    {"seed": 3, "top_p": 0.9, "logprobs": 0},
    {"seed": 4, "top_k": 50, "top_p": 0.8, "min_p": 0.02, "min_tokens": 9},
    {"seed": 5, "logit_bias": ((7, 5.0), (9, -100.0)), "repetition_penalty": 1.2},
]


class EveryThird:
    """A constraint that allows every third token, at each step others."""

    is_ready, is_complete = True, False

    def __init__(self):
        self.num_taken = 0

    def take(self, token_id):
        assert token_id % 3 == self.num_taken % 3
        self.num_taken += 1

    def allowed(self, vocab_size, end_token_ids):
        bits = np.arange(-(-vocab_size // 32) * 32) % 3 == self.num_taken % 3
        return np.packbits(bits, bitorder="little").view(np.int32)


def tokens(device, vocab_size, num_steps):
    states = [
        SamplerState(
            SamplingParams(**kind),
            (1, 2, 3),
            vocab_size,
            (),
            f"r{i}",
            constraint=EveryThird() if i % 2 else None,
        )
        for i, kind in enumerate(KINDS)
    ]
    generator, sampler, rows = torch.Generator().manual_seed(0), Sampler(), []
    for _ in range(num_steps):
        # rounded to bfloat16, so that there are ties
        logits = (torch.randn(len(KINDS), vocab_size, generator=generator) * 3).bfloat16().float()
        events = sampler.sample(logits.to(device), states)
        for state, event in zip(states, events, strict=True):
            state.append(event.token_id)
        rows.append([(event.token_id, [token_id for token_id, _ in event.top]) for event in events])
    return rows


@pytest.mark.parametrize("vocab_size", [50, 32000, 128256])
def test_cuda_gives_the_cpus_tokens(vocab_size):
    assert tokens("cuda", vocab_size, 12) == tokens("cpu", vocab_size, 12)


def test_invalid_logits_have_no_token_on_cuda():
    logits = torch.zeros(2, 100, device="cuda")
    logits[1, 3] = float("nan")
    states = [SamplerState(SamplingParams(logprobs=2), (1,), 100, (0,), name) for name in ("a", "b")]
    valid, invalid = Sampler().sample(logits, states)
    assert valid is not None
    assert invalid is None
