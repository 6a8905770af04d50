"""A store in this process, sequences without an engine, and rows for them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from waiting import PATIENCE, wait_until

from gpu_worker.kernels.rows import ArenaLayout
from gpu_worker.policies.pqcache.policy import PQCache
from gpu_worker.records import Budget, GenerationRequest, SamplingParams
from gpu_worker.row_format import row_dtype
from gpu_worker.runner.intake import Intake
from gpu_worker.state.sequence import Sequence
from gpu_worker.store.arena import ArenaView
from gpu_worker.store.host_registration import register_with_cuda
from kv_store.client import Layout, RowFormat, StaleEpoch, StoreClient
from kv_store.local import LocalStore

ROOT = Path(__file__).resolve().parents[3]
SLAB_BYTES = 4096
VOCAB_SIZE, MAX_MODEL_LEN = 97, 256
# 32 tokens a slab, which they fill; 16 tokens, which leave a quarter free.
FULL = Layout(num_layers=3, num_kv_heads=2, row_format=RowFormat(16, "bf16"))
LOOSE = Layout(num_layers=3, num_kv_heads=3, row_format=RowFormat(8, "fp32"))


@contextmanager
def attached(
    layout: Layout,
    transport: str = "zero_copy",
    num_slabs: int = 256,
    timeout_seconds: float = 5.0,
    connect: Callable[..., StoreClient] = StoreClient.connect,
    **options: Any,
) -> Iterator[tuple[LocalStore, StoreClient]]:
    with LocalStore(num_slabs * SLAB_BYTES, slab_bytes=SLAB_BYTES, **options) as store:
        client = connect(
            store.target,
            layout,
            worker_id="w",
            transport=transport,
            max_gather_rows=512,
            timeout_seconds=timeout_seconds,
        )
        try:
            yield store, client
        finally:
            client.close()


@contextmanager
def store_process(
    layout: Layout, listen: str, target: str, transport: str, num_slabs: int, token: str = ""
) -> Iterator[StoreClient]:
    """Attach to a store in a process of its own, which listens at one address and is found at another."""
    options = {
        "listen": listen,
        "arena-bytes": num_slabs * SLAB_BYTES,
        "slab-bytes": SLAB_BYTES,
        "trainers": 1,
    }
    command = [
        sys.executable,
        "-m",
        "kv_store",
        "--runtime=process",
        *(f"--{k}={v}" for k, v in options.items()),
    ]
    with subprocess.Popen(command, cwd=ROOT, env={**os.environ, "CARREL_STORE_TOKEN": token}) as process:
        try:
            client = StoreClient.connect(
                target,
                layout,
                worker_id="w",
                transport=transport,
                max_gather_rows=512,
                timeout_seconds=PATIENCE,
                token=token,
            )
            yield client
            client.close()
        finally:
            process.kill()


def restart(store: LocalStore, client: StoreClient) -> None:
    """Start the store again, and wait until the client's heartbeat has met the new start: a beat that fell between the
    two said that none is there."""

    def is_met() -> bool:
        try:
            client.check()
        except StaleEpoch:
            return client.is_answering
        return False

    store.restart()
    wait_until(is_met)


def view_of(client: StoreClient, device: torch.device, granule_slabs: int, max_slabs: int = 16) -> ArenaView:
    """A client's arena, registered so many slabs at a time."""
    layout = client.layout
    registration = None
    if device.type == "cuda":
        registration = register_with_cuda(client.arena, granule_slabs * SLAB_BYTES, device)
    return ArenaView(
        client.arena,
        ArenaLayout(SLAB_BYTES, client.tokens_per_slab, layout.row_format),
        layout.num_kv_heads,
        (1, layout.num_layers, max_slabs),
        device,
        registration,
    )


def make_sequence(name: str, seat: int, num_tokens: int) -> Sequence:
    """A prompt of this length that selects from half of it."""
    policies = {"pqcache": PQCache(num_bits=2, num_sink=4)}
    intake = Intake(policies, VOCAB_SIZE, (), None)
    sampling = SamplingParams(max_tokens=MAX_MODEL_LEN - num_tokens, temperature=0.0, seed=1)
    prompt = tuple(position % VOCAB_SIZE for position in range(num_tokens))
    request = GenerationRequest(name, prompt, sampling, "pqcache", Budget(share=0.5))
    sequence = intake.sequence(request)
    sequence.seat = seat
    return sequence


def random_rows(layout: Layout, num_tokens: int, seed: int = 0) -> Tensor:
    """[H_kv, n, 2d] of the layout's type."""
    generator = torch.Generator().manual_seed(seed)
    shape = (layout.num_kv_heads, num_tokens, layout.row_format.row_elements)
    return torch.randn(shape, generator=generator).to(row_dtype(layout.row_format))


def as_bytes(rows: Tensor) -> np.ndarray:
    return rows.cpu().contiguous().view(torch.uint8).numpy()


def count_calls(target: object, name: str) -> list[tuple[object, ...]]:
    """The arguments of every call of a method from now on."""
    calls: list[tuple[object, ...]] = []
    method: Callable[..., object] = getattr(target, name)

    def counted(*arguments: object, **options: object) -> object:
        calls.append((*arguments, *options.values()))
        return method(*arguments, **options)

    setattr(target, name, counted)
    return calls
