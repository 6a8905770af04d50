"""What another host's store has of a prompt, brought to ours before the prompt is computed."""

from __future__ import annotations

import logging

from gpu_worker.engine.intake import Intake
from gpu_worker.policies.base import Family
from gpu_worker.records import Event, GenerationRequest
from gpu_worker.store.prefixes import PrefixChain
from kv_store.client import StoreClient, StoreError

logger = logging.getLogger(__name__)

FETCH_SECONDS = 30.0


class PrefixMover:
    """Asks our store to fetch; it holds no state, and any thread may call it."""

    def __init__(
        self, client: StoreClient, intake: Intake, chain: PrefixChain, timeout_seconds: float = FETCH_SECONDS
    ) -> None:
        self._client = client
        self._intake = intake
        self._chain = chain
        self._timeout_seconds = timeout_seconds

    def fetch(self, request: GenerationRequest) -> int:
        """How many tokens of the prompt our store has, once `request.prefix_source` gave what it has.

        Nothing is asked for where the request could not use it, and a failure is no error: 0, and the log says why.
        """
        sequence = self._intake.sequence(request, _ignore)
        if sequence.policy.family is not Family.RECALL or not sequence.plan.selects:
            return 0
        hashes = self._chain.hashes(sequence)[: self._chain.num_reusable(sequence)]
        if not hashes:
            return 0
        try:
            return self._client.pull_prefix(request.prefix_source, hashes, self._timeout_seconds).num_tokens
        except StoreError as error:
            logger.warning("the prefix of request %s is computed: %s", request.request_id, error)
            return 0


def _ignore(event: Event) -> None:
    """Of a sequence that only plans."""
