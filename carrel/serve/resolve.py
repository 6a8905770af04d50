"""Options from four layers: command line over environment over configuration file over default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from carrel.errors import OptionError
from carrel.serve.flags import Flag
from carrel.serve.options import ServeOptions, default_of, flags

ENV_PREFIX = "CARREL_"
CONFIG_KEY = "config"


@dataclass(frozen=True)
class Resolved:
    """The options and, for each that was given, the layer it came from."""

    options: ServeOptions
    sources: Mapping[str, str]

    def non_default(self) -> dict[str, str]:
        """Long flag -> "value (layer)" of every option that differs from its default, secrets masked."""
        shown = {}
        for name, layer in self.sources.items():
            value = getattr(self.options, name)
            if value != default_of(name):
                text = "***" if flags()[name].is_secret else str(value)
                shown[name.replace("_", "-")] = f"{text} ({layer})"
        return shown


def spellings() -> dict[str, str]:
    """Every accepted name with underscores -> the option's field."""
    return {spelling: name for name, item in flags().items() for spelling in (name, *item.aliases)}


def environment_keys() -> frozenset[str]:
    """The environment variables that `carrel serve` reads."""
    return frozenset(ENV_PREFIX + name.upper() for name in (*spellings(), CONFIG_KEY))


def resolve(command_line: Mapping[str, str], environment: Mapping[str, str]) -> Resolved:
    """Merge the layers.

    `command_line` holds only what was given, by field name, as text. Raises OptionError for an unknown key of
    the file, an option named twice in one layer, and a value that does not parse.
    """
    named = {
        key: environment[key] for key in environment if key in environment_keys() and environment[key] != ""
    }
    config = command_line.get(CONFIG_KEY) or named.pop(ENV_PREFIX + CONFIG_KEY.upper(), None)
    named.pop(ENV_PREFIX + CONFIG_KEY.upper(), None)
    layers = {
        "file": _by_field(
            read_file(Path(config)) if config else {}, str(config), lambda key: key.replace("_", "-")
        ),
        "environment": _by_field(
            {key.removeprefix(ENV_PREFIX).lower(): value for key, value in named.items()},
            "the environment",
            lambda key: ENV_PREFIX + key.upper(),
        ),
        "command line": {
            name: (f"--{name.replace('_', '-')}", text)
            for name, text in command_line.items()
            if name != CONFIG_KEY
        },
    }
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for layer, entries in layers.items():
        for name, (spelled, text) in entries.items():
            values[name] = parse_option(flags()[name], spelled, text, layer)
            sources[name] = layer
    return Resolved(ServeOptions(**values), sources)


def read_file(path: Path) -> dict[str, str]:
    """A YAML file whose keys are long flags without dashes, as text by key with underscores."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise OptionError(f"cannot read --config {path}: {exc.strerror}") from exc
    except (UnicodeDecodeError, yaml.YAMLError) as exc:
        raise OptionError(f"--config {path} is not YAML: {str(exc).splitlines()[0]}") from exc
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise OptionError(f"--config {path}: expected lines such as `port: 8000`")
    entries = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in spellings():
            known = ", ".join(sorted(spelling.replace("_", "-") for spelling in spellings()))
            raise OptionError(f"--config {path}: unknown key {str(key)!r}; known keys: {known}")
        is_switch = flags()[spellings()[name]].is_switch
        if isinstance(value, dict | list | None) or isinstance(value, bool) != is_switch:
            raise OptionError(f"--config {path}: {key} needs {'true or false' if is_switch else 'one value'}")
        entries[name] = str(value)
    return entries


def _by_field(entries: Mapping[str, str], where: str, spell: Any) -> dict[str, tuple[str, str]]:
    fields: dict[str, tuple[str, str]] = {}
    for key, text in entries.items():
        name = spellings()[key]
        if name in fields:
            raise OptionError(f"{where} names both {fields[name][0]} and {spell(key)}: keep one")
        fields[name] = (spell(key), text)
    return fields


def parse_option(item: Flag, spelled: str, text: str, layer: str = "") -> Any:
    """An option's value from text. Raises OptionError that names it as `spelled` and never shows a secret."""
    try:
        return item.parse(text)
    except ValueError as exc:
        shown = "***" if item.is_secret else repr(text)
        reason = str(exc) if str(exc).startswith("expected") else "expected a number"
        raise OptionError(f"{spelled} {shown}{f' ({layer})' if layer else ''}: {reason}") from exc
