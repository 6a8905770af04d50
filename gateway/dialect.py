"""How the model that is served writes calls of tools and what it thinks: told by its chat template, or by an option."""

from __future__ import annotations

from dataclasses import replace

from gateway.answer_parts import AnswerParts
from gateway.errors import InvalidRequest
from gateway.exchange import ChatRequest, TokenIds, ToolChoice, Tools
from gateway.reasoning import BEGIN, ReasoningReader
from gateway.tokenizer import Tokenizer
from gateway.tool_calls import FAMILIES, CallsReader, family_of
from gateway.tool_calls.families import takes_tools
from gateway.tool_calls.written import as_text
from gpu_worker.v1 import gpu_worker_pb2 as pb

AUTO, NONE = "auto", "none"
# of a prompt's end, in which it may begin to think
NUM_LAST_TOKENS = 8


class Dialect:
    """Of one tokenizer's model."""

    def __init__(
        self, tokenizer: Tokenizer, tool_call_parser: str = AUTO, reasoning_parser: str = AUTO
    ) -> None:
        """tool_call_parser: a name of FAMILIES, or auto. reasoning_parser: none, auto, or anything else to look for
        reasoning whatever the template says."""
        template = tokenizer.chat_template or ""
        name = family_of(template) if tool_call_parser == AUTO else tool_call_parser
        self._tokenizer = tokenizer
        self._calls = FAMILIES[name]
        self._takes_tools = takes_tools(template)
        self._thinks = BEGIN in template if reasoning_parser == AUTO else reasoning_parser != NONE
        self._opener_id = tokenizer.special_id(self._calls.opener) if self._calls.is_special else None

    def prepare(self, request: ChatRequest) -> ChatRequest:
        """The request with the grammar of its tools, and for the template that there is. Raises InvalidRequest."""
        if request.tools is not None:
            request = self._with_grammar(request, request.tools)
        if not self._takes_tools:
            tools = () if request.tools is None else request.tools.tools
            request = replace(request, messages=as_text(request.messages, tools, self._calls))
        return request

    def shows_special_tokens(self, request: ChatRequest) -> bool:
        """Whether what tells calls from text is a special token, which texts leave out otherwise."""
        return request.tools is not None and self._calls.is_special

    def parts(self, request: ChatRequest, prompt: TokenIds) -> AnswerParts | None:
        """What parts the answer to a prompt; None: it is text."""
        has_grammar = request.options.draft.HasField("grammar")
        thinks = request.tells_reasoning and self._thinks and not has_grammar
        if request.tools is None and not thinks:
            return None
        end = self._tokenizer.decode(prompt[-NUM_LAST_TOKENS:]).rstrip()
        is_parallel = request.tools is None or request.tools.is_parallel
        return AnswerParts(
            (lambda: ReasoningReader(end.endswith(BEGIN))) if thinks else None,
            None if request.tools is None else lambda index: CallsReader(index, self._calls, is_parallel),
        )

    def _with_grammar(self, request: ChatRequest, tools: Tools) -> ChatRequest:
        asked = request.options.draft.grammar
        is_asked = request.options.draft.HasField("grammar")
        answer: str | None = None
        if tools.choice is ToolChoice.REQUIRED:
            if is_asked:
                raise InvalidRequest(
                    f"tool_choice makes the answer a call, and {asked.param} something else: give one.",
                    asked.param,
                )
        elif is_asked:
            if asked.WhichOneof("kind") != "json_schema":
                raise InvalidRequest(f"Beside tools {asked.param} must be a JSON schema.", asked.param)
            answer = asked.json_schema
        else:
            return request
        grammar = pb.Grammar(ebnf=self._calls.grammar(tools, answer, self._opener_id), param="tools")
        draft = pb.GenerateRequest()
        draft.CopyFrom(request.options.draft)
        draft.grammar.CopyFrom(grammar)
        return replace(request, options=replace(request.options, draft=draft))
