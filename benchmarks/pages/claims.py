"""What the papers or an earlier page claim, asked again on both models: files `claims_MODEL_NAME_*.json`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from benchmarks import tables
from benchmarks.pages.comparison import NOTHING, difference
from benchmarks.pages.joined import Joined, Line, Place, joined, together
from benchmarks.pages.sources import matching, report
from benchmarks.tables import Column
from carrel.evaluation.cells import UNBUDGETED, Cell, budget_name, length_name
from carrel.evaluation.record import Outcome, Source

MODELS = {"nano": "nano", "smollm2": "SmolLM2"}
PROTOCOLS = ("P1", "P2")
# Of `--policy-options`: a policy's name and its fields, up to the next name.
OPTIONS = re.compile(r"[a-z_0-9]+:[^:]*?(?=,[a-z_0-9]+:|$)")
NUMBER = re.compile(r"\d+(?:\.\d+)?")
# The policy that a calibration changes; the others of the file are `+outliers` by name.
SKEWED = "infinigen"


@dataclass(frozen=True)
class Asked:
    """A policy and budget of one experiment, and what its worker was told."""

    name: str
    told: str
    line: Line

    def of(self, model: str) -> Joined:
        """The answers of one model, beside `full`'s to the same questions, whatever run asked them."""
        own: dict[Cell, tuple[Outcome, ...]] = {}
        for file in matching(f"claims_{model}_{self.name}_*"):
            for cell, outcomes in together([file]).cells.items():
                is_own = Line(cell.policy, cell.budget) == self.line
                if is_own and told(report(file).source, cell.policy) == self.told:
                    own[cell] = _once((*own.get(cell, ()), *outcomes))
        places = set(Joined(own).places())
        full = joined(f"quality_{model}_*", f"claims_{model}_*").only(
            lambda cell: cell.policy == UNBUDGETED and Place(cell.task, cell.length, cell.protocol) in places
        )
        return Joined({**full.cells, **own})


def experiments(*names: str) -> Callable[[], str]:
    """The lines of these experiments with scores by model and protocol."""

    def table() -> str:
        asked = sorted(
            {each for name in names for model in MODELS for each in _asked(model, name)},
            key=lambda each: (names.index(each.name), each.line.rank, _numbers(each.told), each.told),
        )
        if not asked:
            return NOTHING
        columns: list[Column[Asked]] = [
            Column("policy", lambda each: f"`{each.line.policy}`{each.told}", False),
            Column("budget", lambda each: budget_name(each.line.budget)),
        ]
        for model, shown in MODELS.items():
            places = [place for name in names for place in joined(f"claims_{model}_{name}_*").places()]
            if not places:
                continue
            at = " and ".join(length_name(length) for length in sorted({place.length for place in places}))
            columns += [
                Column(f"{shown} {at}, {each}", _score(model, each))
                for each in PROTOCOLS
                if each in {place.protocol for place in places}
            ]
            columns.append(Column("against `full`", _against(model)))
            columns.append(Column("documents", _documents(model)))
            if any(_best(model)(each) for each in asked):
                columns.append(Column("of the best", _best(model)))
        return tables.markdown(columns, asked)

    return table


def told(source: Source, policy: str) -> str:
    """What a policy's worker was told beyond its defaults, for the reader: options of other policies are left out."""
    given = [
        option
        for option in OPTIONS.findall(source.policy_options or "")
        if option.partition(":")[0] in policy.split("+")
    ]
    given += [f"{source.full_layers} layers whole"] if source.full_layers else []
    given += [f"by {source.granularity}"] if source.granularity else []
    given += ["calibrated"] if source.calibration_sha256 and policy == SKEWED else []
    return ", ".join(["", *given])


def _numbers(text: str) -> list[float]:
    """To sort by: 80 before 320."""
    return [float(number) for number in NUMBER.findall(text)]


def _asked(model: str, name: str) -> set[Asked]:
    return {
        Asked(name, told(report(file).source, cell.policy), Line(cell.policy, cell.budget))
        for file in matching(f"claims_{model}_{name}_*")
        for cell in together([file]).cells
        if cell.policy != UNBUDGETED
    }


def _once(outcomes: Iterable[Outcome]) -> tuple[Outcome, ...]:
    """Of a document that stands there several times, the last."""
    return tuple({one.index: one for one in outcomes}.values())


def _score(model: str, protocol: str) -> Callable[[Asked], str]:
    def text(each: Asked) -> str:
        found = each.of(model)
        scores = [found.score(place, each.line) for place in found.places() if place.protocol == protocol]
        known = [score for score in scores if score is not None]
        return f"{sum(known) / len(known):.2f}" if known else ""

    return text


def _against(model: str) -> Callable[[Asked], str]:
    def text(each: Asked) -> str:
        found = each.of(model)
        return difference(found, each.line, found.places()) if found.cells else ""

    return text


def _documents(model: str) -> Callable[[Asked], str]:
    def text(each: Asked) -> str:
        found = each.of(model)
        return found.num_documents(each.line) if found.cells else ""

    return text


def _best(model: str) -> Callable[[Asked], str]:
    """Where it was measured."""

    def text(each: Asked) -> str:
        mean = each.of(model).mean(each.line, lambda outcome: outcome.best_recall)
        return "" if mean is None else f"{mean:.3f}"

    return text
