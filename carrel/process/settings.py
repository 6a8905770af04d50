"""Options as they are read: the command line over CARREL_* variables over a YAML file over the default.

pydantic-settings reads variables and files, pydantic checks the values; the command line is of `command_line`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError, create_model
from pydantic_settings import BaseSettings, EnvSettingsSource, YamlConfigSettingsSource

from carrel.process.command_line import CONFIG, Parser, add_options, gone_field
from carrel.process.options import (
    ENV_PREFIX,
    Option,
    OptionError,
    did_you_mean,
    options_of,
    spellings,
    variable,
)
from carrel.process.removed import removed

T = TypeVar("T")


@dataclass(frozen=True)
class Given:
    """The text of an option that was given, as it is spelled in its layer."""

    option: Option
    spelling: str
    layer: str
    text: str

    def refusal(self, reason: object) -> OptionError:
        """Names the option and the value, but tells no secret."""
        return OptionError(f"{self.spelling} {self.shown!r} ({self.layer}): {reason}")

    @property
    def shown(self) -> str:
        return "***" if self.option.is_secret else self.text


@dataclass(frozen=True)
class Resolved(Generic[T]):
    """The options; and, by field, what was given for them."""

    options: T
    given: Mapping[str, Given]

    @property
    def texts(self) -> dict[str, str]:
        return {field: each.text for field, each in self.given.items()}

    def shown(self) -> dict[str, str]:
        """Name -> "value (layer)" of every option that differs from its default, secrets masked."""
        return {
            each.option.name: f"{each.shown} ({each.layer})"
            for field, each in self.given.items()
            if getattr(self.options, field) != each.option.default
        }


def parse(kind: type[T], parser: Parser, argv: Sequence[str]) -> T:
    """A process's options. Raises OptionError; leaves with 2 for words that are no options."""
    add_options(parser, kind)
    return read(kind, vars(parser.parse_args(argv))).options


def read(kind: type[T], command_line: Mapping[str, Any], *, has_variables: bool = True) -> Resolved[T]:
    """The options from all layers; `command_line` is what `add_options` made of it, by field. Raises OptionError."""
    variables = read_variables(kind) if has_variables else {}
    in_environment = variables.pop(variable(CONFIG), None)
    path = command_line.get(CONFIG) or in_environment
    return resolve(
        kind,
        {
            "file": read_file(Path(path)) if path else {},
            "environment": variables,
            "command line": _flags(kind, command_line),
        },
    )


def validate(kind: type[T], texts: Mapping[str, str]) -> T:
    """The options of a process from those of `texts`, by field, that it knows. Raises OptionError."""
    return resolve(kind, {"command line": _flags(kind, texts)}).options


def resolve(kind: type[T], layers: Mapping[str, Mapping[str, Any]]) -> Resolved[T]:
    """Merge layers, later ones over earlier; each has values by their spelling there.

    Raises OptionError for an unknown name, an option named twice in one layer, and a value that cannot be used.
    """
    known, gone = spellings(kind), removed(kind)
    given: dict[str, Given] = {}
    for layer, values in layers.items():
        for spelling, value in values.items():
            name = spelling.removeprefix("--").removeprefix(ENV_PREFIX).replace("-", "_").lower()
            if name in gone:
                raise OptionError(f"{spelling} ({layer}) is no longer an option: {gone[name]}")
            if name not in known:
                listed = ", ".join(sorted(each.replace("_", "-") for each in known))
                meant = did_you_mean(name, known).replace("_", "-")
                raise OptionError(f"{spelling} ({layer}): unknown option; known ones: {listed}{meant}")
            option = known[name]
            before = given.get(option.field)
            if before is not None and before.layer == layer:
                raise OptionError(f"the {layer} names both {before.spelling} and {spelling}: keep one")
            given[option.field] = Given(option, spelling, layer, _text(option, spelling, layer, value))
    try:
        options = TypeAdapter(kind).validate_python({field: _parsed(each) for field, each in given.items()})
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        field = str(first["loc"][0])
        if field not in given:
            (option,) = (each for each in options_of(kind) if each.field == field)
            what = option.metavar if option.is_positional else option.flags[0]
            raise OptionError(f"{what} is missing: give it, or set {variable(option.name)}") from exc
        raise given[field].refusal(first["msg"].replace("Input should", "must")) from exc
    return Resolved(options, given)


def read_variables(kind: type) -> dict[str, Any]:
    """Read the variables of this kind's options, of removed ones and of --config that are not empty."""
    fields: dict[str, Any] = dict.fromkeys((*spellings(kind), *removed(kind), CONFIG), (str | None, None))
    names = create_model(kind.__name__, __base__=BaseSettings, **fields)
    found = EnvSettingsSource(names, env_prefix=ENV_PREFIX, env_ignore_empty=True)()
    return {variable(name): text for name, text in found.items()}


def ignored_variables(kind: type, environment: Mapping[str, str]) -> list[str]:
    """A sentence for each variable that is named like one of an option and is none of this kind."""
    known = [variable(name) for name in (*spellings(kind), *removed(kind), CONFIG)]
    ignored = sorted(
        name for name in environment if name.startswith(ENV_PREFIX) and name.upper() not in known
    )
    return [f"{name} is no option and is ignored{did_you_mean(name, known)}" for name in ignored]


def read_file(path: Path) -> dict[str, Any]:
    """The keys and values of a YAML file. Raises OptionError."""
    try:
        node = yaml.compose(path.read_text(encoding="utf-8"))
        if not isinstance(node, yaml.MappingNode | None):
            raise OptionError(f"--config {path}: expected lines such as `port: 8000`")
        keys = [str(key.value) for key, _ in node.value] if node else []
        for key in keys:
            if keys.count(key) > 1:
                raise OptionError(f"--config {path}: {key} is given twice")
        return dict(
            YamlConfigSettingsSource(BaseSettings, yaml_file=path, yaml_file_encoding="utf-8").yaml_data
        )
    except OSError as exc:
        raise OptionError(f"cannot read --config {path}: {exc.strerror}") from exc
    except yaml.MarkedYAMLError as exc:
        where = f"line {exc.problem_mark.line + 1}: " if exc.problem_mark is not None else ""
        raise OptionError(f"--config {path} is not YAML: {where}{exc.problem}") from exc
    except (UnicodeDecodeError, yaml.YAMLError) as exc:
        raise OptionError(f"--config {path} is not YAML: {str(exc).splitlines()[0]}") from exc


def _flags(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    gone = {f"--{name.replace('_', '-')}": "" for name in removed(kind) if gone_field(name) in values}
    return gone | {each.flags[0]: values[each.field] for each in options_of(kind) if each.field in values}


def _text(option: Option, spelling: str, layer: str, value: Any) -> str:
    """One value as it would stand on the command line: all layers are read alike."""
    if isinstance(value, list) and option.is_list:
        return ",".join(map(str, value))
    if isinstance(value, dict | list | None):
        raise OptionError(f"{spelling} ({layer}) needs one value")
    return str(value)


def _parsed(given: Given) -> Any:
    try:
        return given.option.parse(given.text) if given.option.parse else given.text
    except ValueError as exc:
        raise given.refusal(exc) from exc
