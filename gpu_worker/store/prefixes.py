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


class Prefixes:
    """Names the slabs that prompts fill, and remembers the last names that this worker has listed in the store: a guess
    at the prefixes that are there, without asking.

    tokens_per_slab: tokens that each further hash of a chain covers.
    """

    def __init__(self, root: bytes | None = None, tokens_per_slab: int = 1) -> None:
        """root: name of the model; None: prompts share nothing."""
        self._root = root
        self.tokens_per_slab = tokens_per_slab
        self._known: OrderedDict[bytes, None] = OrderedDict()

    def names(self, sequence: Sequence) -> tuple[tuple[bytes, ...], int]:
        """Return the names of the slabs that the prefilled part of the prompt fills, which the sequence keeps, and how
        many of the first ones it may look up."""
        if self._root is None or not sequence.shares_prompt:
            return (), 0
        if sequence.names is None:
            sequence.names = self._chain(self._root, sequence)
        return sequence.names, self._num_reusable(sequence) if sequence.trusts_prefixes else 0

    def _chain(self, root: bytes, sequence: Sequence) -> tuple[bytes, ...]:
        per_slab, request = self.tokens_per_slab, sequence.request
        token_ids = array("I", sequence.prefill_token_ids)
        link, chain = _digest(root, request.prefix_salt), []
        if request.cache_salt:
            salt = request.cache_salt.encode("utf-8", "surrogateescape")
            # No prompt's tokens give such a link.
            link = hashlib.blake2b(salt, key=link, digest_size=32, person=b"salt").digest()
        for begin in range(0, len(token_ids) - per_slab + 1, per_slab):
            link = _digest(link, token_ids[begin : begin + per_slab].tobytes())
            chain.append(link)
        return tuple(chain)

    def _num_reusable(self, sequence: Sequence) -> int:
        """Return how many slabs need not be computed: the last token always is, and so are the tokens whose queries the
        policy reads, and a prompt that is scored."""
        plan, policy = sequence.plan, sequence.policy
        if sequence.scores_prompt:
            return 0
        num_computed = max(1, policy.num_queries(plan) if plan.selects else 0)
        return max(0, sequence.num_prefill - num_computed) // self.tokens_per_slab

    def add(self, names: Iterable[bytes]) -> None:
        """Remember names that are listed in the store now; the oldest ones are forgotten."""
        for name in names:
            self._known[name] = None
            self._known.move_to_end(name)
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def count_known_tokens(self, names: Iterable[bytes]) -> int:
        """Return how many tokens the known first names of a chain cover."""
        return self.tokens_per_slab * sum(1 for _ in takewhile(self._known.__contains__, names))

    def clear(self) -> None:
        """Forget all names: the store that had them is lost."""
        self._known.clear()


def model_root(model: LoadedModel) -> bytes:
    """Return a name of all that decides rows: the weights as they are on the device, the configuration, and the kinds
    of device and of products.

    Equal weights have equal names on every host and in every folder. Call it while there is memory: on a GPU it takes
    some 32 MiB.
    """
    # Where an answer ends, and which type was proposed, changes no row.
    config = replace(model.config, eos_token_ids=(), checkpoint_dtype=None)
    facts = (weights_digest(model.decoder), config, model.decoder.device.type, *model.decoder.packed_kinds)
    return _digest(b"carrel", repr(facts).encode())


def _digest(link: bytes, content: bytes) -> bytes:
    # The key keeps what came before apart from what is added.
    return hashlib.blake2b(content, key=link[:64], digest_size=32).digest()
