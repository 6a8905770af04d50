"""API keys from a file: each with a name and its limits, read again when it changes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from carrel.process.options import num_bytes
from gateway.errors import ConfigError

RELOAD_SECONDS = 1.0
# that the worker takes
MAX_WEIGHT = 1e6
MAX_NAME = 64

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Limits of one key; None: no limit of its own.

    max_concurrent: requests at once. requests_per_minute; tokens_per_minute, of prompts and answers. arena_bytes: that
    its running requests may fill of the KV store's arena.
    """

    max_concurrent: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    arena_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """weight: of its prompts beside those of others."""

    name: str
    key: str
    weight: float = 1.0
    limits: KeyLimits = KeyLimits()


class KeyFile:
    """The entries of a file, as it is now. Raises ConfigError for one that cannot be used at first; later it is logged
    once, and the keys stay as they were."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._content = _content(path)
        self._entries = _parsed(path, self._content)
        self._failure = ""
        self._looked_at = clock()

    def entries(self) -> tuple[KeyEntry, ...]:
        """Looks at the file once a second at most; the same tuple while nothing has changed."""
        if self._clock() - self._looked_at >= RELOAD_SECONDS:
            self._looked_at = self._clock()
            try:
                self._renew()
            except ConfigError as error:
                if str(error) != self._failure:
                    log.error("the API keys stay as they were: %s", error)
                self._failure = str(error)
        return self._entries

    def _renew(self) -> None:
        # Sizes and times may stay when a key is taken out.
        content = _content(self._path)
        if content == self._content and not self._failure:
            return
        self._entries = _parsed(self._path, content)
        self._content, self._failure = content, ""
        log.warning("%d API keys were read again", len(self._entries))


def read_keys(path: Path) -> tuple[KeyEntry, ...]:
    """A YAML list of `name`, `key`, and as they are wanted `weight` and the fields of KeyLimits, with dashes. Raises
    ConfigError, which never has a key."""
    return _parsed(path, _content(path))


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as exc:
        raise ConfigError(f"--api-keys-file {path} cannot be read: {exc.strerror}") from exc


def _parsed(path: Path, content: bytes) -> tuple[KeyEntry, ...]:
    try:
        found = yaml.safe_load(content.decode())
    except (UnicodeDecodeError, yaml.YAMLError):
        # the error would show a line of the file
        raise ConfigError(f"--api-keys-file {path} is no YAML") from None
    if not isinstance(found, list) or not found:
        raise ConfigError(f"--api-keys-file {path} must be a list of keys: `- name: NAME` with `  key: KEY`")
    entries = tuple(_entry(path, place, each) for place, each in enumerate(found, 1))
    for what, values in (("names", [e.name for e in entries]), ("keys", [e.key for e in entries])):
        if len(set(values)) < len(values):
            raise ConfigError(f"--api-keys-file {path}: two {what} are the same")
    return entries


def _entry(path: Path, place: int, found: Any) -> KeyEntry:
    where = f"--api-keys-file {path}, entry {place}"
    if not isinstance(found, dict):
        raise ConfigError(f"{where}: must have `name` and `key`")
    values = {str(name).replace("-", "_"): value for name, value in found.items()}
    name, key, weight = values.pop("name", None), values.pop("key", None), values.pop("weight", 1.0)
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= MAX_NAME:
        raise ConfigError(f"{where}: `name` must be 1 to {MAX_NAME} printable characters")
    if not isinstance(key, str) or not key.isascii() or not key.isprintable() or not key or " " in key:
        raise ConfigError(f"{where}: `key` must be a text that a header can carry; put it in quotes")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight <= MAX_WEIGHT:
        raise ConfigError(f"{where}: `weight` must be a number above 0, and at most {MAX_WEIGHT:g}")
    known = [field.name for field in fields(KeyLimits)]
    if unknown := sorted(set(values) - set(known)):
        names = ", ".join(each.replace("_", "-") for each in ("name", "key", "weight", *known))
        raise ConfigError(f"{where}: {unknown[0].replace('_', '-')!r} is none of {names}")
    return KeyEntry(
        name, key, float(weight), KeyLimits(**{each: _limit(where, each, values[each]) for each in values})
    )


def _limit(where: str, name: str, value: Any) -> int:
    try:
        limit = num_bytes(str(value)) if name == "arena_bytes" else int(value)
    except (TypeError, ValueError):
        limit = 0
    if limit < 1:
        raise ConfigError(f"{where}: `{name.replace('_', '-')}` must be a whole number from 1 up")
    return limit
