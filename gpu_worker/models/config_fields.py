"""Typed, range-checked access to a JSON file of a model directory, whose values are not trusted."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from gpu_worker.errors import ModelError

_MAX_BYTES = 64 << 20


class ConfigFields:
    """The fields of one JSON object. Every getter raises ModelError naming the file, the field and the value.

    A field that is absent or null takes `default`; a getter without a default calls the field required. spelled: what
    messages call fields that the file has under other names.
    """

    def __init__(
        self, values: Mapping[str, object], where: str, spelled: Mapping[str, str] | None = None
    ) -> None:
        self._values = values
        self._spelled = spelled or {}
        self.where = where

    @classmethod
    def read(cls, path: Path) -> ConfigFields:
        """Parse a file; ModelError when it is missing, unreadable, over 64 MiB or not a JSON object."""
        try:
            if path.stat().st_size > _MAX_BYTES:
                raise ModelError(f"{path} is larger than {_MAX_BYTES} bytes; this is no model configuration")
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as exc:
            raise ModelError(f"{path} is missing; a Hugging Face model directory must have it") from exc
        except OSError as exc:
            raise ModelError(f"{path} cannot be read: {exc.strerror or exc}") from exc
        except (ValueError, RecursionError) as exc:
            raise ModelError(f"{path} is not valid JSON ({exc}); download it again") from exc
        if not isinstance(values, dict):
            raise ModelError(f"{path} must hold a JSON object, not {type(values).__name__}")
        return cls(values, str(path))

    def has(self, name: str) -> bool:
        """Return whether the field is there and not null."""
        return self._values.get(name) is not None

    def items(self) -> tuple[tuple[str, object], ...]:
        return tuple(self._values.items())

    def changed(self, values: Mapping[str, object]) -> ConfigFields:
        """Return the same object with other values of these fields."""
        return ConfigFields({**self._values, **values}, self.where, self._spelled)

    def fail(self, name: str, expected: str) -> ModelError:
        """The error for a field that is not as `expected`; the caller raises it."""
        return ModelError(f"{self.shown(name)}; expected {expected}")

    def shown(self, name: str) -> str:
        """Return words that say where the field is and what it is, shortened."""
        value = repr(self._values[name]) if self.has(name) else "missing"
        value = value if len(value) <= 80 else value[:77] + "..."
        return f"{self.where}: field {self._spelled.get(name, name)!r} is {value}"

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.fail(name, f"an integer from {low} to {high}")
        return value

    def number(self, name: str, low: float, high: float, default: float | None = None) -> float:
        value = self._get(name, default)
        # NaN fails the comparison too
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise self.fail(name, f"a number from {low:g} to {high:g}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.fail(name, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self.fail(name, "a string")
        return value

    def choice(self, name: str, choices: Collection[str], default: str | None = None) -> str:
        value = self.text(name, default)
        if value not in choices:
            raise self.fail(name, f"one of {', '.join(sorted(choices))}")
        return value

    def object(self, name: str) -> ConfigFields:
        """A nested object; empty when absent."""
        value = self._get(name, {})
        if not isinstance(value, dict):
            raise self.fail(name, "an object")
        return ConfigFields(value, f"{self.where}: {name}")

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings; empty when absent."""
        value = self._get(name, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.fail(name, "a list of strings")
        return tuple(value)

    def numbers(self, name: str, length: int, low: float, high: float) -> tuple[float, ...]:
        """Return a list of so many numbers; it is required."""
        values = self._get(name, None)
        if (
            not isinstance(values, list)
            or len(values) != length
            or not all(type(value) in (int, float) and low <= value <= high for value in values)
        ):
            raise self.fail(name, f"a list of {length} numbers from {low:g} to {high:g}")
        return tuple(float(value) for value in values)

    def integers(self, name: str, count: int, default: list[int]) -> tuple[int, ...]:
        """A list of so many positive integers."""
        value = self._get(name, default)
        is_list = isinstance(value, list) and len(value) == count
        if not is_list or not all(type(item) is int and item > 0 for item in value):
            raise self.fail(name, f"a list of {count} positive integers")
        return tuple(value)

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """One token id or a list of them; empty when absent."""
        value = self._get(name, [])
        ids = value if isinstance(value, list) else [value]
        if not all(type(item) is int and 0 <= item < vocab_size for item in ids):
            raise self.fail(name, f"a token id or a list of token ids from 0 to {vocab_size - 1}")
        return tuple(ids)

    def _get(self, name: str, default: Any) -> Any:
        value = self._values.get(name)
        return default if value is None else value
