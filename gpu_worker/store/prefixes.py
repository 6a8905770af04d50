"""Names under which the store keeps prompt prefixes.

A prefix has a chain of hashes, one for each slab that it fills. A hash covers everything that decides a slab's rows:
the model, the caller, the salt that it gave, and every token up to the slab's last.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace
from itertools import takewhile

from gpu_worker.models import LoadedModel, weights_digest
from gpu_worker.state.sequence import Sequence

# Names that are remembered: some 100 bytes each.
MAX_KNOWN = 1 << 16


class PrefixChain:
    """root: of the model. tokens_per_slab: tokens that each further hash covers."""

    def __init__(self, root: bytes, tokens_per_slab: int) -> None:
        self._root = root
        self.tokens_per_slab = tokens_per_slab

    def hashes(self, sequence: Sequence) -> tuple[bytes, ...]:
        """Of the slabs that the prefilled part of the prompt fills; the sequence keeps them."""
        if sequence.names is None:
            sequence.names = self._hashes(sequence)
        return sequence.names

    def _hashes(self, sequence: Sequence) -> tuple[bytes, ...]:
        per_slab, request = self.tokens_per_slab, sequence.request
        token_ids = array("I", sequence.prefill_token_ids)
        link, chain = _digest(self._root, request.prefix_salt), []
        if request.cache_salt:
            salt = request.cache_salt.encode("utf-8", "surrogateescape")
            # No prompt's tokens give such a link.
            link = hashlib.blake2b(salt, key=link, digest_size=32, person=b"salt").digest()
        for begin in range(0, len(token_ids) - per_slab + 1, per_slab):
            link = _digest(link, token_ids[begin : begin + per_slab].tobytes())
            chain.append(link)
        return tuple(chain)

    def num_reusable(self, sequence: Sequence) -> int:
        """How many of its hashes a sequence may look up: the last token is always computed, and so are the tokens whose
        queries the policy reads, and a prompt that is scored."""
        plan, policy = sequence.plan, sequence.policy
        if sequence.scores_prompt:
            return 0
        num_computed = max(1, policy.num_queries(plan) if plan.selects else 0)
        return max(0, sequence.num_prefill - num_computed) // self.tokens_per_slab


class KnownPrefixes:
    """Names of slabs that this worker has listed in the store, the last `capacity` of them: a guess at what is there,
    without asking."""

    def __init__(self, capacity: int = MAX_KNOWN) -> None:
        self._capacity = capacity
        self._names: OrderedDict[bytes, None] = OrderedDict()

    def add(self, hashes: Iterable[bytes]) -> None:
        for name in hashes:
            self._names[name] = None
            self._names.move_to_end(name)
        while len(self._names) > self._capacity:
            self._names.popitem(last=False)

    def count(self, hashes: Iterable[bytes]) -> int:
        """How many of a chain's first names are among them."""
        return sum(1 for _ in takewhile(self._names.__contains__, hashes))

    def clear(self) -> None:
        self._names.clear()


def model_root(model: LoadedModel) -> bytes:
    """A name of what computes rows: the weights as they are on the device, the configuration, and the kind of device.

    Equal weights have equal names on every host and in every folder. Call it while there is memory: on a GPU it takes
    some 32 MiB.
    """
    # Where an answer ends, and which type was proposed, changes no row.
    config = replace(model.config, eos_token_ids=(), checkpoint_dtype=None)
    facts = (weights_digest(model.decoder), config, model.decoder.device.type)
    return _digest(b"carrel", repr(facts).encode())


def _digest(link: bytes, content: bytes) -> bytes:
    # The key keeps what came before apart from what is added.
    return hashlib.blake2b(content, key=link[:64], digest_size=32).digest()
