"""Fields that would change the answer and are not done: each route refuses them by name, those of other routes among
them. Inside an object a field's type says so: `fields.refused`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.errors import InvalidRequest
from gateway.rest.fields import changes_nothing
from gateway.rest.messages.schemas import CountBody, MessagesBody
from gateway.rest.responses.schemas import ResponsesBody
from gateway.rest.schemas import Body, ChatBody, CompletionBody

# of other servers and of OpenAI's own, each with the value that changes nothing; see `changes_nothing`
OTHERS: Mapping[str, Any] = {
    "allowed_token_ids": None,
    "audio": None,
    "background": None,
    "background_options": None,
    "bad_words": None,
    "chat_template": None,
    "compaction": None,
    "container": None,
    "context_management": None,
    "conversation": None,
    "documents": None,
    "ec_transfer_params": None,
    "enable_response_messages": None,
    "fallbacks": None,
    "function_call": "none",
    "generate": True,
    "guided_whitespace_pattern": None,
    "inference_geo": None,
    "kv_transfer_params": None,
    "length_penalty": 1,
    "logits_processors": None,
    "mcp_servers": None,
    "modalities": ["text"],
    "moderation": None,
    "output_format": None,
    "previous_input_messages": None,
    "prompt_embeds": None,
    "repetition_detection": None,
    "return_prompt_text": None,
    "return_tokens_as_token_ids": None,
    "spaces_between_special_tokens": True,
    "thinking_token_budget": None,
    "thread": None,
    "truncation_side": "left",
    "use_beam_search": None,
    "verbosity": "medium",
    "vllm_xargs": None,
    "web_search_options": None,
}
# of one route at least; another ignores them
HARMLESS = frozenset(
    {"metadata", "prompt_cache_key", "prompt_cache_options", "store", "stream_options", "user"}
)
# what those of other routes are without being sent
DEFAULTS: Mapping[str, Any] = {
    "add_generation_prompt": True,
    "add_special_tokens": False,
    "best_of": 1,
    "frequency_penalty": 0,
    "include_reasoning": True,
    "min_p": 0,
    "min_tokens": 0,
    "n": 1,
    "parallel_tool_calls": True,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "skip_special_tokens": True,
    "tool_choice": "none",
    "top_logprobs": 0,
    "truncation": "disabled",
}
BODIES: tuple[type[Body], ...] = (ChatBody, CompletionBody, MessagesBody, ResponsesBody)


def unsupported_of(kind: type[Body]) -> dict[str, Any]:
    """Return the names that a body of this kind refuses, each with the value that changes nothing."""
    names = {name for body in BODIES for name in body.model_fields} - HARMLESS
    every = {**{name: DEFAULTS.get(name) for name in names}, **OTHERS}
    return {name: neutral for name, neutral in every.items() if name not in kind.model_fields}


UNSUPPORTED: dict[type[Body], Mapping[str, Any]] = {kind: unsupported_of(kind) for kind in BODIES}
# it is asked to count what the other would be asked to answer
UNSUPPORTED[CountBody] = UNSUPPORTED[MessagesBody]


def refuse_unsupported(body: Body) -> None:
    """Raises InvalidRequest."""
    unsupported = UNSUPPORTED[type(body)]
    for name, value in (body.model_extra or {}).items():
        if name in unsupported and not changes_nothing(value, unsupported[name]):
            raise InvalidRequest(f"{name} is not supported here: leave it out.", name)
