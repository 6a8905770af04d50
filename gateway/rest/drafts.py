"""What every body asks of the worker alike."""

from __future__ import annotations

from gateway.rest.schemas import WorkBody
from gpu_worker.v1 import gpu_worker_pb2 as pb

# far above any context, and a safe number in every protocol
MAX_BUDGET_TOKENS = 2**53
# of a policy's options, as the command line has them
WORDS = {"True": "on", "False": "off"}


def draft_of(
    body: WorkBody,
    caller: bytes,
    session_id: str | None,
    sampling: pb.SamplingParams,
    grammar: pb.Grammar | None = None,
) -> pb.GenerateRequest:
    """The worker's request, but for its id and its tokens. caller: whose prefixes it shares. grammar: what the answer
    must be; None: anything."""
    draft = pb.GenerateRequest(
        sampling=sampling,
        session_id=session_id or "",
        prefix_salt=caller,
        cache_salt=body.cache_salt or "",
        priority=body.priority or 0,
        grammar=grammar,
    )
    if (ours := body.carrel) is not None:
        draft.policy = ours.policy or ""
        draft.attention = bool(ours.attention)
        if ours.budget is not None:
            draft.budget.CopyFrom(_read_budget(ours.budget))
        draft.policy_options.update(
            {name: WORDS.get(str(value), str(value)) for name, value in (ours.options or {}).items()}
        )
    return draft


def _read_budget(budget: float) -> pb.Budget:
    """1 is the whole context."""
    if budget <= 1:
        return pb.Budget(share=budget)
    return pb.Budget(tokens=min(int(budget), MAX_BUDGET_TOKENS))
