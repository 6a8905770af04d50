"""A prompt of 100,000 tokens that is told with how likely it was, by `make faults`: what others and memory see."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
from figures import since, tell
from serving import NANO, Serving, serving
from transformers import LlamaConfig, LlamaForCausalLM
from waiting import PATIENCE, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]

LENGTH, VOCAB = 100_000, 8192
# of a prompt that is told
MOST_MIB = 2048


def save_long_model(folder: Path) -> Path:
    """Random weights, a context of 131,072 tokens, and the bundled model's tokenizer."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=1 << 17,
        eos_token_id=4,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(NANO / name, folder / name)
    return folder


class Others(threading.Thread):
    """A stream beside, and the milliseconds between its tokens."""

    def __init__(self, server: Serving) -> None:
        super().__init__(daemon=True)
        self._url = f"{server.url}/v1/completions"
        self._is_over = threading.Event()
        self.gaps: list[float] = []
        self.start()

    def run(self) -> None:
        body = {"prompt": [7] * 20, "max_tokens": 100_000, "stream": True, "ignore_eos": True}
        body |= {"carrel": {"policy": "full"}}
        with httpx.stream("POST", self._url, json=body, timeout=PATIENCE) as reply:
            before = None
            for line in reply.iter_lines():
                if self._is_over.is_set():
                    return
                if line.startswith("data: {"):
                    now = time.monotonic()
                    self.gaps += [] if before is None else [1e3 * (now - before)]
                    before = now

    def end(self) -> dict[str, float]:
        self._is_over.set()
        self.join(PATIENCE)
        p50, p99 = np.percentile(self.gaps, [50, 99])
        return {"p50_ms": round(p50, 1), "p99_ms": round(p99, 1), "tokens": len(self.gaps)}


def peaks(server: Serving) -> dict[str, int]:
    """The most memory that worker and gateway ever had, in MiB."""
    found = {}
    for name in ("gpu_worker", "gateway"):
        status = Path(f"/proc/{server.child(name).pid}/status").read_text()
        found[name] = int(status.partition("VmHWM:")[2].split()[0]) >> 10
    return found


def complete(server: Serving, **fields: object) -> httpx.Response:
    prompt = np.random.default_rng(len(fields)).integers(10, VOCAB, LENGTH).tolist()
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "carrel": {"policy": "full"}, **fields}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=1500)


def test_a_long_prompt_that_is_told_costs_others_little_and_memory_is_bounded(tmp_path: Path) -> None:
    options = ("--no-warmup", "--log-level", "warning", "--prefix-cache", "off")
    with serving(*options, model=save_long_model(tmp_path)) as server:
        told: dict[str, object] = {"load": psutil.getloadavg()[0]}
        others = Others(server)
        wait_until(lambda: len(others.gaps) > 500)
        told["others alone"] = others.end()

        others, begin = Others(server), time.monotonic()
        assert complete(server).status_code == 200
        told["beside a plain prompt"] = {**others.end(), "prompt_s": since(begin)}
        before = peaks(server)

        others, begin = Others(server), time.monotonic()
        echo = complete(server, echo=True, logprobs=1)
        told["beside an echo"] = {**others.end(), "prompt_s": since(begin)}
        assert echo.status_code == 200, echo.text[:300]
        assert len(echo.json()["choices"][0]["logprobs"]["token_logprobs"]) == LENGTH + 1
        after = peaks(server)
        told["more memory, MiB"] = {name: after[name] - before[name] for name in before}
        refused = complete(server, echo=True, logprobs=2)
        told["logprobs: 2"] = refused.json()["error"]["message"]
        tell("an echo of 100,000 tokens", **told)
        assert refused.status_code == 400
        assert sum(after.values()) - sum(before.values()) < MOST_MIB
