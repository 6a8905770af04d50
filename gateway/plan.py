"""A request on its way: what it asks for, checked, and what the worker is asked for each of its choices."""

from __future__ import annotations

import asyncio
import sys
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from carrel.process.request_limits import (
    MAX_CHOICES,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    RANGES,
    check_request,
    num_output_tokens,
)
from gateway.answer_parts import AnswerParts
from gateway.errors import InvalidRequest, invalid_requests
from gateway.exchange import AS_MANY_AS_FIT, Echo, GenerationOptions, TokenIds
from gateway.prompts import check_text
from gpu_worker.v1 import gpu_worker_pb2 as pb

# log probabilities that one answer tells of prompts: some megabytes of JSON
MAX_PROMPT_SCORES = 1 << 18
# what a field of packed numbers is on the wire
LENGTH_DELIMITED = 2


async def no_echo(at: int, prompt: TokenIds) -> None:
    """Nothing comes before the answer."""


@dataclass(frozen=True)
class Plan:
    """`encode` makes its prompts, given the model's maximum length, which `default_max_tokens` 0 fills; `echo` what
    comes before the answer, of a prompt's place and its tokens; `parts` what parts the answers to a prompt.
    `is_verbatim`: the client holds the answer to a grammar, so that not even its `lead` is left out. `shows_special`:
    texts have special tokens by their names."""

    request_id: str
    endpoint: str
    prompt_param: str
    num_prompts: int
    encode: Callable[[int], Awaitable[tuple[TokenIds, ...]]]
    default_max_tokens: int
    options: GenerationOptions
    lead: str = ""
    is_verbatim: bool = False
    echo: Callable[[int, TokenIds], Awaitable[Echo | None]] = no_echo
    parts: Callable[[TokenIds], AnswerParts | None] = lambda prompt: None
    shows_special: bool = False

    @property
    def num_choices(self) -> int:
        return self.num_prompts * self.options.n

    @property
    def caller(self) -> bytes:
        return self.options.draft.prefix_salt

    def check(self, info: pb.GetInfoResponse) -> None:
        """All that needs no prompt. Raises InvalidRequest that names the field."""
        options = self.options
        with invalid_requests():
            check_request(options.draft, info)
        check_text(options.draft.session_id, "session_id")
        check_text(options.draft.cache_salt, "cache_salt")
        if options.n not in RANGES["n"]:
            raise InvalidRequest(f"n must be in {RANGES['n']}.", "n")
        if not 0 < self.num_choices <= MAX_CHOICES:
            raise InvalidRequest(
                f"{self.num_prompts} prompts with n={options.n}: a request may have 1 to {MAX_CHOICES} choices.",
                self.prompt_param,
            )
        if len(options.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(
                f"{len(options.stop)} stop strings: give at most {MAX_STOP_STRINGS}.", "stop"
            )
        for stop in options.stop:
            check_text(stop, "stop")
            if not 0 < len(stop) <= MAX_STOP_CHARS:
                raise InvalidRequest(f"A stop string must have 1 to {MAX_STOP_CHARS} characters.", "stop")

    async def prompts(self, max_model_len: int) -> tuple[TokenIds, ...]:
        """Raises InvalidRequest."""
        if (kept := self.options.truncate_to) is None:
            prompts = await self.encode(max_model_len)
        else:
            if kept == AS_MANY_AS_FIT:
                num_answer = self.options.draft.sampling.max_tokens or self.default_max_tokens or 1
                kept = max(1, max_model_len - num_answer)
            # what is left out need not fit
            prompts = tuple(prompt[-kept:] for prompt in await self.encode(sys.maxsize))
        self._check_scores(sum(map(len, prompts)) * self.options.n)
        return prompts

    def _check_scores(self, num_tokens: int) -> None:
        sampling = self.options.draft.sampling
        num_scores = num_tokens * (1 + sampling.prompt_logprobs)
        if sampling.HasField("prompt_logprobs") and num_scores > MAX_PROMPT_SCORES:
            raise InvalidRequest(
                f"echo with logprobs, or prompt_logprobs, would tell {num_scores} of them: at most "
                f"{MAX_PROMPT_SCORES}, with the prompts' tokens, once for each choice, and the alternatives to each. "
                "Ask for fewer alternatives, or shorter prompts.",
                "logprobs",
            )

    async def request(
        self, request: pb.GenerateRequest, seed_offset: int, prompt: TokenIds, max_model_len: int
    ) -> None:
        """Fill in what is the request's own for a choice of this prompt; `request` has the defaults. Others have their
        turns meanwhile. Raises InvalidRequest."""
        if not prompt:
            raise InvalidRequest("The prompt is empty: give at least one token.", self.prompt_param)
        request.MergeFrom(self.options.draft)
        sampling, room = request.sampling, max_model_len - len(prompt)
        if sampling.HasField("seed"):
            # equal seeds would make equal choices
            sampling.seed = (sampling.seed + seed_offset) % 2**63
        if not sampling.HasField("max_tokens") and 0 < self.default_max_tokens < room:
            sampling.max_tokens = self.default_max_tokens
        with invalid_requests():
            sampling.max_tokens = num_output_tokens(sampling, len(prompt), max_model_len, self.prompt_param)
        request.MergeFromString(_with_prompt(prompt))
        await asyncio.sleep(0)


def _with_prompt(prompt: TokenIds) -> bytes:
    """A written `GenerateRequest` that has only these ids: to put them into one by one takes fifty times as long."""
    ids = array("I", prompt)
    if sys.byteorder == "big":
        ids.byteswap()
    written, number = ids.tobytes(), pb.GenerateRequest.PROMPT_TOKEN_IDS_FIELD_NUMBER
    return _varint(number << 3 | LENGTH_DELIMITED) + _varint(len(written)) + written


def _varint(number: int) -> bytes:
    """Seven bits a byte, the lowest first; the eighth says that more follow."""
    written = bytearray()
    while number >= 0x80:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    written.append(number)
    return bytes(written)
