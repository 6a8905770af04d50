"""How a gateway's handle picks a replica: the gateway chooses, Serve checks that there is room."""

from __future__ import annotations

import random
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

# keyword arguments of a request, which the replica ignores
ONLY = "only"
WANTED = "wanted"
LOST = "lost"


class WishRouter(RequestRouter):
    """The wanted replica first, then the others, last those that were lost; of equals Serve takes the least loaded.

    A call for only one replica goes to no other while that is there.
    """

    # Serve asks a replica how many calls it has. In its own 0.1 s a busy one does not answer: what it knows of a
    # session or a prompt would be computed elsewhere.
    queue_len_response_deadline_s = 1.0

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        wish: dict[str, Any] = pending_request.kwargs if pending_request is not None else {}
        if pending_request is not None:
            # each round has tried all replicas: the next one may wait
            pending_request.routing_context.should_backoff = True
        if only := [each for each in candidate_replicas if each.replica_id.unique_id == wish.get(ONLY)]:
            return [only]
        return ranked(candidate_replicas, wish.get(WANTED, ""), wish.get(LOST, ()))


def ranked(replicas: list[RunningReplica], wanted: str, lost: tuple[str, ...]) -> list[list[RunningReplica]]:
    """Groups of replicas, the best first, none empty; no order within a group."""
    groups: tuple[list[RunningReplica], ...] = ([], [], [])
    for replica in random.sample(replicas, len(replicas)):
        name = replica.replica_id.unique_id
        groups[2 if name in lost else 0 if name == wanted else 1].append(replica)
    return [group for group in groups if group]
