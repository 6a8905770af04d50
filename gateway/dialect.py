"""How the model that is served writes calls of tools and what it thinks: told by its chat template, or by an option."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from carrel.process.request_limits import check_grammar
from gateway.answer_parts import BEGIN, AnswerParts, ReasoningReader
from gateway.errors import InvalidRequest, invalid_requests
from gateway.exchange import ChatRequest, TokenIds, ToolChoice, Tools
from gateway.tokenizer import Tokenizer
from gateway.tool_calls import FAMILIES, CallsReader, family_of
from gateway.tool_calls.checks import check_messages
from gateway.tool_calls.families import takes_tools
from gateway.tool_calls.written import as_text, one_by_one, taken_back
from gpu_worker.v1 import gpu_worker_pb2 as pb

AUTO, NONE = "auto", "none"
EFFORT = "reasoning_effort"
# turns thinking on or off
THINKING = "enable_thinking"
# of a prompt's end, in which it may begin to think
NUM_LAST_TOKENS = 8


class Dialect:
    """The formats of one tokenizer's model."""

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
        self.template_names = frozenset(name for name in (EFFORT, THINKING) if name in template)
        self._thinks = BEGIN in template if reasoning_parser == AUTO else reasoning_parser != NONE
        self._opener_id = tokenizer.special_id(self._calls.opener) if self._calls.is_special else None

    def prepare(self, request: ChatRequest) -> ChatRequest:
        """The request with the grammar of its tools, its effort for the template, and telling reasoning where there may
        be any. Raises InvalidRequest and TooLarge."""
        check_messages(request.messages)
        request = replace(request, messages=tuple(map(taken_back, request.messages)))
        if (effort := request.reasoning_effort) is not None:
            if EFFORT not in self.template_names:
                raise InvalidRequest(f"This model's chat template knows no {EFFORT}: leave it out.", EFFORT)
            request = replace(request, template_arguments={EFFORT: effort, **request.template_arguments})
        has_grammar = request.options.draft.HasField("grammar")
        if (tools := request.tools) is not None:
            grammar = self._grammar(request, tools)
            request = request if grammar is None else _with_grammar(request, grammar)
            has_grammar |= tools.choice is ToolChoice.REQUIRED
        # what is held to a grammar from its beginning has no room to think
        return replace(request, tells_reasoning=request.tells_reasoning and self._thinks and not has_grammar)

    def written(self, request: ChatRequest) -> ChatRequest:
        """The prepared request for the template that there is; of thousands of calls it belongs in a thread."""
        if self._takes_tools:
            has_several = any(len(message.tool_calls) > 1 for message in request.messages)
            if has_several and self._tokenizer.takes_one_call:
                return replace(request, messages=tuple(one_by_one(request.messages)))
            return request
        tools = () if request.tools is None else request.tools.tools
        return replace(request, messages=as_text(request.messages, tools, self._calls))

    def shows_special_tokens(self, request: ChatRequest) -> bool:
        """Return whether calls are marked by a special token, which texts leave out otherwise."""
        return request.tools is not None and self._calls.is_special

    def parts(self, request: ChatRequest, prompt: TokenIds) -> AnswerParts | None:
        """Return the splitter of the answer to a prepared request's prompt; None: the answer is plain text."""
        thinks = request.tells_reasoning
        if request.tools is None and not thinks:
            return None
        end = self._tokenizer.decode(prompt[-NUM_LAST_TOKENS:]).rstrip()
        return AnswerParts(
            (lambda: ReasoningReader(end.endswith(BEGIN), request.hides_reasoning)) if thinks else None,
            None if request.tools is None else partial(self._reader, request.tools),
        )

    def _reader(self, tools: Tools, index: int) -> CallsReader:
        return CallsReader(index, self._calls, tools.is_parallel, {tool.name for tool in tools.tools})

    def _grammar(self, request: ChatRequest, tools: Tools) -> str | None:
        """None: the answer is not held to any of its tools."""
        asked = request.options.draft.grammar if request.options.draft.HasField("grammar") else None
        if asked is None:
            is_free = tools.choice is ToolChoice.AUTO
            if is_free and not any(tool.strict for tool in tools.callable):
                return None
            try:
                return self._calls.grammar(tools, None, self._opener_id, is_free)
            except RecursionError as error:
                raise InvalidRequest("The parameters of a tool are nested too deeply.", "tools") from error
        if tools.choice is ToolChoice.REQUIRED:
            raise InvalidRequest(
                f"tool_choice makes the answer a call, and {asked.param} something else: give one.",
                asked.param,
            )
        if asked.WhichOneof("kind") != "json_schema":
            raise InvalidRequest(f"Beside tools {asked.param} must be a JSON schema.", asked.param)
        with invalid_requests():
            check_grammar(asked)
        try:
            return self._calls.grammar(tools, asked.json_schema, self._opener_id)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{asked.param} is no JSON schema: {error}.", asked.param) from error


def _with_grammar(request: ChatRequest, ebnf: str) -> ChatRequest:
    draft = pb.GenerateRequest()
    draft.CopyFrom(request.options.draft)
    draft.grammar.CopyFrom(pb.Grammar(ebnf=ebnf, param="tools"))
    return replace(request, options=replace(request.options, draft=draft))
