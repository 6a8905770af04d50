"""Options as they are declared, spelled and read: one path for all processes."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from carrel.cli import build_parser
from carrel.commands import COMMANDS
from carrel.commands.deploy import DeployOptions
from carrel.process.command_line import Parser, add_options, arguments
from carrel.process.options import (
    REQUIRED,
    OptionError,
    auto_or_bytes,
    num_bytes,
    option,
    options_of,
    share_or_tokens,
    variable,
)
from carrel.process.settings import Resolved, ignored_variables, parse, read, validate
from carrel.serve.options import ServeOptions
from gateway.config import GatewayConfig
from gpu_worker.config import WorkerConfig
from kv_store.config import StoreConfig

ROOT = Path(__file__).resolve().parents[3]
KINDS = (GatewayConfig, WorkerConfig, StoreConfig, ServeOptions, DeployOptions)


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Options that several processes share."""

    room: int = option("2MiB", "so much", also=("kv-room",), parse=num_bytes, ge=4096, metavar="SIZE")
    words: tuple[str, ...] = option((), "several", name="word")


@dataclass(frozen=True, kw_only=True)
class Toy(Shared):
    """Its own."""

    place: str = option(REQUIRED, "where", positional=True, metavar="PLACE")
    seats: int = option(8, "how many", ge=1, le=99)
    wait_s: float = option(1.5, "seconds", name="wait", ge=0, allow_inf_nan=False)
    color: Literal["red", "blue"] = option("red", "red or blue")
    key: str = option("", "tell nobody", secret=True)
    is_loud: bool = option(False, "a switch", name="loud")
    is_open: bool = option(True, "on or off", name="open")
    made: int = 3


def given(*argv: str, kind: type = Toy, **variables: str) -> Resolved[Any]:
    parser = Parser(prog="toy")
    add_options(parser, kind)
    with pytest.MonkeyPatch.context() as patch:
        for name, text in variables.items():
            patch.setenv(name, text)
        return read(kind, vars(parser.parse_args(argv)))


def refusal(*argv: str, **variables: str) -> str:
    with pytest.raises(OptionError) as error:
        given(*argv, **variables)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "toy.yaml"


def test_defaults() -> None:
    assert given("here").options == Toy(place="here", room=2 << 20)


def test_command_line_over_environment_over_file_over_default(config: Path) -> None:
    config.write_text("seats: 11\nwait: 2\ncolor: blue\n")
    resolved = given(
        "here", "--config", str(config), "--seats", "33", CARREL_SEATS="22", CARREL_WAIT="3", CARREL_LOUD=""
    )
    options = resolved.options
    assert (options.seats, options.wait_s, options.color, options.is_loud) == (33, 3.0, "blue", False)
    assert resolved.shown() == {
        "seats": "33 (command line)",
        "wait": "3 (environment)",
        "color": "blue (file)",
        "place": "here (command line)",
    }


def test_variables_that_are_no_options_are_told() -> None:
    environment = dict.fromkeys(("CARREL_SEAT", "CARREL_SEATS", "carrel_wait", "CARREL_CONFIG", "HOME"), "1")
    assert ignored_variables(Toy, environment) == [
        "CARREL_SEAT is no option and is ignored; did you mean CARREL_SEATS?"
    ]


def test_the_file_may_come_from_the_environment(config: Path) -> None:
    config.write_text("place: there\nword: [a, b]\nopen: off\nloud: true\nkv-room: 1G\n")
    expected = Toy(place="there", words=("a", "b"), is_open=False, is_loud=True, room=2**30)
    assert given(CARREL_CONFIG=str(config)).options == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- seats\n", "expected lines such as"),
        ("seats: [1, 2]\n", r"seats \(file\) needs one value"),
        ("seats:\n", r"seats \(file\) needs one value"),
        ("seats: 1\nword: a: b\n", "is not YAML: line 2: mapping values are not allowed here"),
        ("seats: 1\nword: [a\n", r"is not YAML: line 3: expected ',' or '\]'"),
        ("seats: {\n", "is not YAML: line 2: "),
        ("seats: \0\n", "is not YAML: unacceptable character"),
        ("seats: 1\nseats: 2\n", "seats is given twice"),
        ("room: 1G\nkv-room: 1G\n", "names both room and kv-room"),
        ("seats: 100\n", r"seats '100' \(file\): must be less than or equal to 99"),
        ("color: green\n", r"color 'green' \(file\): must be 'red' or 'blue'"),
        ("loud: 7\n", r"loud '7' \(file\): must be a valid boolean"),
        ("seets: 1\n", r"seets \(file\): unknown option; known ones: color, key, kv-room"),
    ],
)
def test_a_bad_file_is_refused(config: Path, text: str, message: str) -> None:
    config.write_text(text)
    assert re.search(message, refusal("here", "--config", str(config)))


def test_a_missing_file_is_refused(config: Path) -> None:
    assert "cannot read" in refusal("here", "--config", str(config))


def test_a_value_that_cannot_be_used_is_named_with_its_spelling_and_a_remedy() -> None:
    assert refusal("here", "--seats", "many").startswith("--seats 'many' (command line): must be a valid int")
    assert refusal("here", CARREL_KV_ROOM="1KiB") == (
        "CARREL_KV_ROOM '1KiB' (environment): must be greater than or equal to 4096"
    )
    assert refusal("here", CARREL_ROOM="1 apple").endswith("must be a size such as 8G, 8GiB or 512MiB")
    assert refusal() == "PLACE is missing: give it, or set CARREL_PLACE"
    assert "--wait 'nan'" in refusal("here", "--wait", "nan")


def test_secrets_are_masked_and_on_no_command_line() -> None:
    resolved = given("here", "--key", "hush")
    assert resolved.shown()["key"] == "*** (command line)"
    assert "hush" not in repr(resolved.options)
    assert "hush" not in " ".join(arguments(Toy, resolved.texts))

    @dataclass(frozen=True, kw_only=True)
    class Strict:
        """It."""

        key: int = option(1, "a number", secret=True)

    with pytest.raises(OptionError) as error:
        given("--key", "hush", kind=Strict)
    assert "hush" not in str(error.value)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--seats", "1", "--seats", "2"], "--seats is given twice"),
        (["--room", "1M", "--kv-room", "2M"], "--kv-room is given twice"),
        (["--loud", "--loud"], "--loud is given twice"),
        (["--word", "a", "--word", "b"], "--word is given twice"),
        (["--seat", "1"], "unrecognized arguments: --seat"),
        (["--seats"], "expected one argument"),
    ],
)
def test_wrong_words_show_the_usage_and_end_with_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(Toy, Parser(prog="toy"), ["here", *argv])
    assert ended.value.code == 2
    usage, error = capsys.readouterr().err.splitlines()
    assert usage == "usage: toy [PLACE] [--OPTION VALUE ...]"
    assert message in error


def test_what_a_process_is_given_is_what_it_reads() -> None:
    argv = ["here", "--room", "1.5GiB", "--word", "a", "b", "--loud", "--open", "off", "--wait", "2"]
    resolved = given(*argv, "--key", "k")
    passed = arguments(Toy, resolved.texts)
    assert given(*passed, CARREL_KEY="k").options == resolved.options
    assert validate(Toy, resolved.texts) == resolved.options
    # and those that are another's are left out
    assert arguments(Shared, resolved.texts) == ["--room", "1.5GiB", "--word", "a,b"]
    assert arguments(Toy, {"is_loud": "false"}) == []


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_option_is_in_the_help_with_its_default_and_its_variable(kind: type) -> None:
    parser = Parser(prog="p")
    add_options(parser, kind, has_variables=kind is not DeployOptions)
    shown = " ".join(parser.format_help().split())
    for each in options_of(kind):
        assert each.is_positional or f"{each.flags[0]} " in shown
        assert each.help in shown.replace("- ", "-") or each.help in shown
        assert f"(default: {each.shown})" in shown or not each.shown
        assert f"[{variable(each.name)}]" in shown or kind is DeployOptions


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_defaults_are_ones_that_the_options_themselves_would_take(kind: type) -> None:
    required = {each.field: "unix:/x" for each in options_of(kind) if each.default is REQUIRED}
    shown = {each.field: each.shown for each in options_of(kind) if each.shown}
    # what is free differs from one moment to the next
    required |= {"arena_bytes": "8MiB"}
    assert validate(kind, {**required, **shown}) == validate(kind, required)


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (num_bytes, "1024", 1024),
        (num_bytes, "8G", 8 * 2**30),
        (num_bytes, "8GiB", 8 * 2**30),
        (auto_or_bytes, "512m", 512 * 2**20),
        (num_bytes, "4096kib", 2**22),
        (num_bytes, "1.5 GB", 3 * 2**29),
        (share_or_tokens, "0.1", (0.1, None)),
        (share_or_tokens, "1", (1.0, None)),
        (share_or_tokens, "1e-3", (0.001, None)),
        (share_or_tokens, "2", (None, 2)),
        (share_or_tokens, "2048", (None, 2048)),
    ],
)
def test_sizes_shares_and_numbers_of_tokens(read: Callable[[str], object], text: str, value: object) -> None:
    assert read(text) == value


@pytest.mark.parametrize(
    ("read", "texts", "message"),
    [
        (num_bytes, ["", "-1", "8 apples", "0", "nan", "1e9", "MiB"], "must be a size"),
        (
            share_or_tokens,
            ["0", "-1", "1.5", "2.0", "nan", "inf", "", "many", "1e3", "9" * 400],
            "must be a share",
        ),
    ],
)
def test_others_are_refused(read: Callable[[str], object], texts: list[str], message: str) -> None:
    for text in texts:
        with pytest.raises(ValueError, match=message):
            read(text)


def error_texts(source: str) -> list[str]:
    """All text in what is raised, and in what makes an error."""
    found = []
    for node in ast.walk(ast.parse(source)):
        is_error = isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Error")
        if isinstance(node, ast.Raise) or is_error:
            found += [
                part.value
                for part in ast.walk(node)
                if isinstance(part, ast.Constant) and isinstance(part.value, str)
            ]
    return found


def flags_of(commands: Mapping[str, Any]) -> set[str]:
    _, parsers = build_parser(list(commands))
    return {
        flag
        for parser in parsers.values()
        for flag in re.findall(r"--[a-z][a-z-]+[a-z]", parser.format_help())
    }


def test_every_flag_that_an_error_names_exists() -> None:
    known = flags_of(COMMANDS) | {flag for kind in KINDS for each in options_of(kind) for flag in each.flags}
    # of other programs, and of what carrel eval and calibrate start
    known |= {"--head", "--samples", "--job", "--help", "--config"}
    named = {
        (flag, str(file.relative_to(ROOT)))
        for package in ("carrel", "gateway", "gpu_worker", "kv_store")
        for file in (ROOT / package).rglob("*.py")
        for text in error_texts(file.read_text())
        for flag in re.findall(r"--[a-z][a-z-]+[a-z]", text)
    }
    assert len(named) > 30
    assert {each for each in named if each[0] not in known} == set()
