"""Types of the fields of bodies, with the ranges of their numbers."""

from __future__ import annotations

from array import array
from contextlib import suppress
from dataclasses import asdict
from itertools import islice
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    StringConstraints,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
)
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import PydanticCustomError

from carrel.process.request_limits import MAX_SESSION_CHARS, MAX_UINT32, MIN_BUDGET_TOKENS, RANGES
from gateway.exchange import PLAIN_ID
from gateway.tool_calls.checks import FUNCTION_NAME

TokenId = Annotated[int, Field(ge=0, le=MAX_UINT32)]
# of a prompt: one of texts that are numbers is one of texts
PromptTokenId = Annotated[int, Field(ge=0, le=MAX_UINT32, strict=True)]
# Of a long list one error is enough: pydantic makes one for each item, and for each kind of list that it might be.
# Objects have no `fail_fast`: see `OneByOne`.
Texts = Annotated[list[str], Field(fail_fast=True)]


def _packed(token_ids: list[int]) -> array[int]:
    """The same ids in a ninth of the memory."""
    return array("I", token_ids)


Packed = AfterValidator(_packed)
StopTokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
TokenIds = Annotated[StopTokenIds, Packed]
PromptTokenIds = Annotated[list[PromptTokenId], Field(fail_fast=True), Packed]


def _one_by_one(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """An object, checked as far as its first wrong entry."""
    if type(value) is not dict:
        return check(value)
    checked: dict[Any, Any] = {}
    entries = iter(value.items())
    while some := dict(islice(entries, NUM_AT_ONCE)):
        try:
            checked |= check(some)
        except ValidationError:
            for name, each in some.items():
                check({name: each})
            raise
    return checked


# of an object: entries that are checked together, where all of them are right
NUM_AT_ONCE = 256
OneByOne = WrapValidator(_one_by_one)


# the type of such an error
NOT_DONE = "not_done"


def changes_nothing(value: Any, *neutral: Any) -> bool:
    """Return whether a field of this value might as well be left out: null, false, empty or `neutral`."""
    return value is None or value is False or value in ("", [], {}, *neutral)


def refused(*neutral: Any) -> Any:
    """pydantic's validator of a field that would change the answer and is not done."""

    def check(value: Any) -> None:
        if not changes_nothing(value, *neutral):
            raise PydanticCustomError(NOT_DONE, "this is not supported: leave it out")

    return BeforeValidator(check)


# no document tells of it
Hidden = SkipJsonSchema[Any]
Refused = Annotated[Hidden, refused()]


def within(name: str) -> Any:
    """pydantic's constraint for the range of that name."""
    return Field(**asdict(RANGES[name]))


def _check_budget(value: Any, check: ValidatorFunctionWrapHandler) -> float:
    """One error for whatever is none of both kinds."""
    with suppress(ValidationError):
        budget: float = check(value)
        if budget in RANGES["budget_share"] or (budget >= MIN_BUDGET_TOKENS and budget == int(budget)):
            return budget
    raise ValueError(
        f"give a share of the prompt in {RANGES['budget_share']}, or a whole number of tokens from "
        f"{MIN_BUDGET_TOKENS} up"
    )


def _check_kept(value: int) -> int:
    if value:
        return value
    raise ValueError("give a number of tokens from 1 up, or -1 for as many as fit")


# of a prompt's last tokens
NumKept = Annotated[int, Field(ge=-1, le=MAX_UINT32), AfterValidator(_check_kept)]

# -1 is off, as 0 is
TopK = Annotated[int, Field(ge=-1, le=MAX_UINT32)]
SessionName = Annotated[str, Field(min_length=1, max_length=MAX_SESSION_CHARS)]
CacheKey = Annotated[str | None, Field(description="the session_id of a request without one")]

# what is not done by then ends with 504; less than what the server gives every request
Timeout = Annotated[float, Field(gt=0)]

# nothing that a policy's field is called, or may be, has other characters
OptionName = Annotated[str, StringConstraints(pattern=r"^[a-z_]{1,64}$")]
OptionWord = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.+-]{1,64}$")]


BUDGET = {
    "description": "tokens attended: a share of the prompt up to 1, else a number of tokens",
    "anyOf": [
        {
            "type": "number",
            "exclusiveMinimum": RANGES["budget_share"].gt,
            "maximum": RANGES["budget_share"].le,
        },
        {"type": "integer", "minimum": MIN_BUDGET_TOKENS},
    ],
}
Budget = Annotated[int | float, WrapValidator(_check_budget), WithJsonSchema(BUDGET)]

# of a request, that goes into headers and logs
RequestId = Annotated[str, StringConstraints(pattern=f"^{PLAIN_ID}$")]

FunctionName = Annotated[str, StringConstraints(pattern=FUNCTION_NAME)]
