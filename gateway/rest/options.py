"""Options of a request, read from the bodies of all APIs alike."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from carrel.process.request_limits import MAX_SESSION_CHARS
from gateway.exchange import GenerationOptions
from gateway.rest.schemas import WorkBody
from gpu_worker.v1 import gpu_worker_pb2 as pb

# far above any context, and a safe number in every protocol
MAX_BUDGET_TOKENS = 2**53
# of a policy's options, as the command line has them
WORDS = {"True": "on", "False": "off"}
# the worker's fields, which a body has by the same names
SAMPLING_FIELDS = {field.name for field in pb.SamplingParams.DESCRIPTOR.fields}


def session_of(session_id: str | None, cache_key: str | None) -> str:
    """The session of a request: the one that it names, or its `prompt_cache_key`; empty: none. A key that no session
    may be called is replaced by its digest."""
    if session_id or not cache_key:
        return session_id or ""
    is_name = len(cache_key) <= MAX_SESSION_CHARS and "\x00" not in cache_key
    return cache_key if is_name else hashlib.sha256(cache_key.encode()).hexdigest()


def read_options(
    body: WorkBody,
    caller: bytes,
    session_id: str | None,
    sampling: Mapping[str, Any] = {},
    grammar: pb.Grammar | None = None,
    **others: Any,
) -> GenerationOptions:
    """The options of a body.

    caller: whose prefixes it shares.
    sampling: the worker's fields that a body has by other names, or otherwise; None leaves one absent.
    grammar: what the answer must be; None: anything.
    others: of `GenerationOptions`.
    """
    named = SAMPLING_FIELDS & type(body).model_fields.keys()
    draft = pb.GenerateRequest(
        sampling=_read_sampling({**body.model_dump(include=named), **sampling}),
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
    return GenerationOptions(body.model, draft=draft, **others)


def _read_sampling(values: dict[str, Any]) -> pb.SamplingParams:
    if (top_k := values.get("top_k")) is not None:
        # -1 is off, as 0 is
        values["top_k"] = max(top_k, 0)
    if (seed := values.get("seed")) is not None:
        values["seed"] = seed % 2**63
    return pb.SamplingParams(**values)


def _read_budget(budget: float) -> pb.Budget:
    """1 is the whole context."""
    if budget <= 1:
        return pb.Budget(share=budget)
    return pb.Budget(tokens=min(int(budget), MAX_BUDGET_TOKENS))
