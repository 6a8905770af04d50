"""The model's assumptions. Its measured inputs are in `measured.py`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

GIB = 2**30


@dataclass(frozen=True)
class RequestKind:
    """Requests alike: tokens of the prompt and of the answer."""

    name: str
    prompt_tokens: int
    output_tokens: int


CHAT = RequestKind("chat", 2048, 200)
DOCUMENT = RequestKind("document", 32768, 300)
# with an answer of 500 tokens as long as the model goes
LONG = RequestKind("long", 130560, 500)
KINDS = (CHAT, DOCUMENT, LONG)


@dataclass(frozen=True)
class Mix:
    """Of all requests, the share of each kind, in the order of KINDS; how many repeat a known prefix.

    answers: how many times as long as the kind's own.
    """

    name: str
    shares: tuple[float, float, float]
    repeated: float = 0.5
    answers: int = 1

    @property
    def kinds(self) -> tuple[RequestKind, ...]:
        return tuple(replace(kind, output_tokens=self.answers * kind.output_tokens) for kind in KINDS)


MIXES = {
    mix.name: mix
    for mix in (
        Mix("mixed", (0.6, 0.3, 0.1)),
        Mix("chat", (0.95, 0.05, 0.0)),
        Mix("long", (0.2, 0.4, 0.4)),
        Mix("long answers", (0.6, 0.3, 0.1), repeated=0.9, answers=10),
    )
}


class Routing(StrEnum):
    """Which replica a request goes to.

    AFFINITY: that which has the request's prefix or session, else the least loaded. COMPUTED: the least loaded, which
    computes what it does not have.
    """

    AFFINITY = "affinity"
    COMPUTED = "least loaded, prefixes computed again"


@dataclass(frozen=True)
class ClusterParameters:
    """Assumed, all of it.

    gpu_bytes, host_bytes: memory of a GPU, and of the host for each. arena_share: of host memory for rows.
    gateways_per_node: processes, each with a core.
    prefixes_per_gpu: documents, system prompts and sessions that requests come back to, all equally often.
    prefix_share: of a prompt that comes back. max_num_seqs, prefill_chunk: the worker's defaults. tokens_per_slab:
    prefixes are shared in whole slabs.
    """

    gpu_bytes: int = 139 * GIB
    host_bytes: int = 128 * GIB
    arena_share: float = 0.85
    gpus_per_node: int = 8
    gateways_per_node: int = 2
    prefixes_per_gpu: float = 8.0
    prefix_share: float = 0.9
    max_num_seqs: int = 32
    prefill_chunk: int = 2048
    tokens_per_slab: int = 512

    def prefix_tokens(self, kind: RequestKind) -> int:
        """Of a prompt that comes back: whole slabs."""
        return int(kind.prompt_tokens * self.prefix_share) // self.tokens_per_slab * self.tokens_per_slab

    def num_prefixes(self, share: float, num_gpus: int) -> int:
        """Of a kind that is this share of the requests."""
        return max(1, round(self.prefixes_per_gpu * num_gpus * share))
