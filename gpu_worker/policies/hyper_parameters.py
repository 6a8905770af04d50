"""Which hyper-parameters of a policy may be set, and to what: its fields whose types say so. Needs no torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast, get_args, get_type_hints

if TYPE_CHECKING:
    from gpu_worker.policies.base import Policy

PolicyT = TypeVar("PolicyT", bound="Policy")


@dataclass(frozen=True, slots=True)
class Between:
    """Numbers from `low` to `high`. is_odd: only odd ones."""

    low: float
    high: float
    is_odd: bool = False

    def read(self, kind: type, text: str) -> object:
        value = kind(text)
        # the negated form also refuses NaN
        if not self.low <= value <= self.high or (self.is_odd and value % 2 == 0):
            raise ValueError(f"{text} is out of range")
        return value

    def __str__(self) -> str:
        return f"{'an odd number, ' * self.is_odd}{self.low} to {self.high}"


@dataclass(frozen=True, slots=True)
class OneOf:
    """These words; a switch is `on` or `off`."""

    words: tuple[str, ...] = ("on", "off")

    def read(self, kind: type, text: str) -> object:
        if text not in self.words:
            raise ValueError(f"{text} is none of them")
        return text == "on" if kind is bool else text

    def __str__(self) -> str:
        return " or ".join(self.words)


# Marks a field that only `Policy.plan` reads: no state is laid out by it, so each request may have its own.
PER_REQUEST = "per request"

# Types of fields that may be set.
Tokens = Annotated[int, Between(0, 100_000)]
SomeTokens = Annotated[int, Between(1, 100_000)]
Share = Annotated[float, Between(0, 1)]
Iterations = Annotated[int, Between(0, 1000)]
SplitTokens = Annotated[int, Between(0, 100_000), PER_REQUEST]
SplitShare = Annotated[float, Between(0, 1), PER_REQUEST]
Switch = Annotated[bool, OneOf()]


@dataclass(frozen=True, slots=True)
class HyperParameter:
    """A field that may be set; by a request too where it is `of_request`."""

    name: str
    kind: type
    rule: Between | OneOf
    of_request: bool

    def read(self, text: str) -> object:
        """Raises ValueError."""
        try:
            return self.rule.read(self.kind, text)
        except ValueError as error:
            raise ValueError(f"{self.name}={text}: give {self.rule}") from error

    def __str__(self) -> str:
        return f"{self.name} ({self.range})"

    @property
    def range(self) -> str:
        """The allowed values, and whether a request may set them."""
        return f"{self.rule}, {PER_REQUEST}" if self.of_request else str(self.rule)


def hyper_parameters(policy: Policy) -> dict[str, HyperParameter]:
    """By name, in the order of the fields. Fields that make another policy, of another name, are none."""
    if not is_dataclass(policy):
        return {}
    hints = get_type_hints(type(policy), include_extras=True)
    declared = {field.name: get_args(hints[field.name]) for field in fields(policy)}
    return {
        name: HyperParameter(name, parts[0], parts[1], PER_REQUEST in parts)
        for name, parts in declared.items()
        if hasattr(hints[name], "__metadata__")
    }


def with_options(policy: PolicyT, texts: Mapping[str, str], *, of_request: bool = False) -> PolicyT:
    """The policy with these fields, read from texts. of_request: those alone that a request may set.

    Raises ValueError, which lists the fields that there are.
    """
    if not texts:
        return policy
    known = {
        name: each for name, each in hyper_parameters(policy).items() if each.of_request or not of_request
    }
    values = {}
    for name, text in texts.items():
        if name not in known:
            listed = ", ".join(map(str, known.values())) or "none"
            whose = " of a request" * of_request
            raise ValueError(f"{policy.name} has no option {name!r}{whose}; it has: {listed}")
        try:
            values[name] = known[name].read(text)
        except ValueError as error:
            raise ValueError(f"{policy.name}: {error}") from error
    changed: Any = policy
    try:
        return cast(PolicyT, replace(changed, **values))
    except ValueError as error:
        raise ValueError(f"{policy.name}: {error}") from error


def read_options(words: Iterable[str], names: Collection[str]) -> dict[str, dict[str, str]]:
    """By policy, of `names`, and field: from `NAME:FIELD=VALUE` and, of the policy named last, `FIELD=VALUE`.

    Raises ValueError.
    """
    found: dict[str, dict[str, str]] = {}
    policy = ""
    for word in words:
        name, separator, rest = word.partition(":")
        policy, assignment = (name, rest) if separator else (policy, word)
        field, equals, value = assignment.partition("=")
        if not (policy and field and equals and value):
            raise ValueError(f"{word!r}: give NAME:FIELD=VALUE, such as pqcache:num_bits=5")
        if policy not in names:
            raise ValueError(f"no policy {policy!r} has options; choose one of {', '.join(sorted(names))}")
        if field in found.setdefault(policy, {}):
            raise ValueError(f"{policy}:{field} is given twice")
        found[policy][field] = value
    return found
