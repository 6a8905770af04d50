"""`carrel plan`: what GPUs of several sizes hold of a model, without its weights and without a GPU."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from carrel.process.command_line import flag, new_file
from carrel.process.options import num_bytes, options_of
from carrel.process.sizing import Card, Held, Sizing
from carrel.sizing import find_config, read_sizing
from carrel.tables import Column, gib, show, tokens
from gpu_worker.config import WorkerOptions

GIB = 1 << 30
CARDS = [size * GIB for size in (16, 24, 48, 80, 141)]
# A smaller number lacks its unit.
LEAST_CARD, LEAST_HOST = 2 * GIB, GIB
# Options of the worker that change its plan.
WORKER_FIELDS = (
    "revision",
    "dtype",
    "max_model_len",
    "hf_overrides",
    "max_num_seqs",
    "prefill_chunk",
    "policy",
    "policy_options",
    "budget",
    "full_layers",
    "calibration",
    "transport",
    "index_device",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [MODEL] [--OPTION VALUE ...]"
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="model directory, its config.json, GGUF file or Hugging Face id (default: the bundled carrel-nano)",
    )
    parser.add_argument(
        "--gpu",
        type=_card_bytes,
        nargs="+",
        default=CARDS,
        metavar="SIZE",
        help="memory of GPUs (default: 16GiB 24GiB 48GiB 80GiB 141GiB)",
    )
    flag(parser, "--host", "host memory for KV caches (default: no limit)", None, _host_bytes, "SIZE")
    flag(parser, "--json", "also write the figures to this file", None, new_file, "FILE")
    as_served = parser.add_argument_group("As for carrel serve")
    for each in options_of(WorkerOptions):
        if each.field in WORKER_FIELDS:
            shown = f" (default: {each.shown})" if each.shown else ""
            as_served.add_argument(
                *each.flags,
                dest=each.field,
                nargs="+" if each.is_list else None,
                metavar=each.metavar,
                default=argparse.SUPPRESS,
                help=f"{each.help}{shown}".replace("%", "%%"),
            )


def run(arguments: argparse.Namespace) -> int:
    """Raises CarrelError, OptionError."""
    texts = _given(arguments)
    model = find_config(arguments.model, texts.get("revision"))
    sizing = read_sizing(model, texts, arguments.gpu, arguments.host)
    if arguments.json:
        _write(arguments.json, {"model": model, "options": texts, **asdict(sizing)})
    print(_heading(sizing), end="\n\n")
    show("What a GPU holds", card_columns(), sizing.cards)
    if served := [card for card in sizing.cards if card.held]:
        print()
        show("Requests at once, by length", held_columns(served), served, _notes(sizing))
    return 0


def card_columns() -> list[Column[Card]]:
    return [
        Column("GPU, GiB", size),
        Column("seats", lambda card: str(card.seats) if card.seats else "-"),
        Column("KV tokens", lambda card: f"{card.kv_tokens:,}" if card.seats else "-"),
        Column("longest context", longest),
    ]


def held_columns(cards: Sequence[Card]) -> list[Column[Card]]:
    """Return a column for each length; every card counts the same lengths."""
    lengths = [held.num_tokens for held in cards[0].held]
    return [Column("GPU, GiB", size), *(_held_column(place, length) for place, length in enumerate(lengths))]


def size(card: Card) -> str:
    return f"{card.num_bytes / GIB:.4g}"


def longest(card: Card) -> str:
    return tokens(card.longest) if card.longest else f"does not fit: {gib(card.missing_bytes)} GiB missing"


def counts(held: Held) -> str:
    """Return such as "14 / 70": dense, and under the default policy."""
    return str(held.dense) if held.selecting is None else f"{held.dense} / {held.selecting}"


def _held_column(place: int, length: int) -> Column[Card]:
    return Column(tokens(length), lambda card: counts(card.held[place]))


def _heading(sizing: Sizing) -> str:
    return (
        f"{sizing.num_parameters / 1e6:,.0f} million parameters: {gib(sizing.weight_bytes)} GiB in {sizing.dtype}; "
        f"KV cache: {sizing.token_bytes / 1024:.4g} KiB a token"
    )


def _notes(sizing: Sizing) -> Iterator[str]:
    if any(0 < card.longest < sizing.max_model_len for card in sizing.cards):
        yield "A longest context below the model's must be given as --max-model-len."
    if any(held.selecting is not None for card in sizing.cards for held in card.held):
        yield "Requests at once, by length. Before the slash: all tokens on the GPU (full)."
        yield f"After it: under {sizing.policy} with {sizing.budget}."
    else:
        yield "Requests at once, by length, with all tokens on the GPU."
    if sizing.recalls:
        limit = "no limit" if sizing.host_bytes is None else f"{gib(sizing.host_bytes)} GiB"
        yield f"Caches of {sizing.policy} are in host memory ({limit}), with the fewest slots."


def _given(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the worker's options that were given, as one text each."""
    given = {name: getattr(arguments, name) for name in WORKER_FIELDS if hasattr(arguments, name)}
    lists = {each.field for each in options_of(WorkerOptions) if each.is_list}
    return {name: ",".join(value) if name in lists else value for name, value in given.items()}


def _write(path: Path, content: dict[str, object]) -> None:
    path.absolute().parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")


def _card_bytes(text: str) -> int:
    return _size(text, LEAST_CARD)


def _host_bytes(text: str) -> int:
    return _size(text, LEAST_HOST)


def _size(text: str, least: int) -> int:
    try:
        size = num_bytes(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"{text}: {exc}") from exc
    if size < least:
        raise argparse.ArgumentTypeError(
            f"{text} is {size} bytes; give at least {least >> 30}GiB, with the unit, such as 24GiB"
        )
    return size
