"""A report of every measured passage, and the means by length, policy and budget."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import fmean
from typing import Any

from carrel.errors import EvaluationError
from carrel.evaluation.about import of_both, read_json, write_whole
from carrel.evaluation.cells import UNBUDGETED, budget_name
from carrel.evaluation.scoring import Mean, bootstrap, mean, paired
from carrel.tables import Column, number, tokens

FORMAT = 1
# of the worker's, as they were given, if they were
WORKER_OPTIONS = ("policy_options", "full_layers", "granularity")
# what every passage depends on
SOURCE = ("model_sha256", "books_sha256", "seed", "num_forced", "num_generated", *WORKER_OPTIONS)


@dataclass(frozen=True)
class Passage:
    """One passage under one policy and budget, as `python -m gpu_worker.fidelity` measured it: see its `Measured`.

    length: of the whole passage in tokens. index: which of that length. budget: as a cell has it; None for `full`.
    """

    length: int
    index: int
    policy: str
    budget: float | None
    num_scored: int
    nll: float
    kl: float
    agreement: float
    same_tokens: int | None
    attended: float
    device_bytes: int
    host_bytes: int
    attention_mass: float | None = None
    best_recall: float | None = None
    output_errors: list[list[float]] | None = None


@dataclass(frozen=True)
class Row:
    """Means over the passages of one length, policy and budget.

    perplexity: exp of the mean negative log likelihood. ratio: to that of `full` on the same passages, with the paired
    interval. kl: in nats. same_tokens: generated before the first that differs from `full`'s, of so many as were asked.
    num_measured: passages that the last three are means of. head_errors: output errors by layer and query head;
    output_error: their mean.
    """

    length: int
    policy: str
    budget: float | None
    n: int
    perplexity: float
    ratio: Mean | None
    kl: Mean
    agreement: Mean
    same_tokens: Mean | None
    attended: float
    device_bytes: float
    host_bytes: float
    num_measured: int = 0
    attention_mass: float | None = None
    best_recall: float | None = None
    output_error: float | None = None
    head_errors: list[list[float]] | None = None


@dataclass(frozen=True)
class FidelityReport:
    """about: versions, machine, command and source, for a reader."""

    about: dict[str, Any]
    passages: tuple[Passage, ...]

    def merged(self, other: FidelityReport) -> FidelityReport:
        """With another shard's passages. Raises EvaluationError where it measured something else."""
        differing = [name for name in SOURCE if self.about.get(name) != other.about.get(name)]
        if differing:
            raise EvaluationError(f"the report is of another run: {', '.join(differing)} differ")
        both = {
            (each.length, each.index, each.policy, each.budget): each
            for each in (*self.passages, *other.passages)
        }
        return FidelityReport(of_both(self.about, other.about), tuple(both.values()))

    def rows(self) -> list[Row]:
        """In the order in which they were asked, by length."""
        cells = dict.fromkeys((each.length, each.policy, each.budget) for each in self.passages)
        return [self._row(*cell) for cell in sorted(cells, key=lambda cell: cell[0])]

    def _row(self, length: int, policy: str, budget: float | None) -> Row:
        ours = self._of(length, policy, budget)
        full = self._of(length, UNBUDGETED, None)
        longer = paired({each.index: each.nll for each in ours}, {each.index: each.nll for each in full})
        same = [each.same_tokens for each in ours if each.same_tokens is not None]
        heads = _head_means([each.output_errors for each in ours if each.output_errors])
        return Row(
            length,
            policy,
            budget,
            len(ours),
            math.exp(fmean([each.nll for each in ours])),
            None if longer is None else _exp(longer),
            bootstrap([each.kl for each in ours]),
            bootstrap([each.agreement for each in ours]),
            bootstrap(same) if same else None,
            fmean([each.attended for each in ours]),
            fmean([each.device_bytes for each in ours]),
            fmean([each.host_bytes for each in ours]),
            sum(each.attention_mass is not None for each in ours),
            mean(each.attention_mass for each in ours),
            mean(each.best_recall for each in ours),
            mean(error for layer in heads or () for error in layer),
            heads,
        )

    def _of(self, length: int, policy: str, budget: float | None) -> list[Passage]:
        wanted = (length, policy, budget)
        return [each for each in self.passages if (each.length, each.policy, each.budget) == wanted]

    def write(self, path: Path) -> None:
        """As JSON, by `write_whole`."""
        names = [field.name for field in fields(Passage)]
        content = {
            "format": FORMAT,
            "about": self.about,
            "fidelity": [asdict(row) for row in self.rows()],
            "passage_fields": names,
        }
        lines = ",\n  ".join(json.dumps([getattr(each, name) for name in names]) for each in self.passages)
        text = json.dumps(content, indent=1)[:-2] + f',\n "passages": [\n  {lines}\n ]\n}}\n'
        write_whole(path, text)


def read_fidelity(path: Path) -> FidelityReport:
    """A report as `FidelityReport.write` left it. Raises EvaluationError on any other file."""

    def build(content: dict[str, Any]) -> FidelityReport:
        names = content["passage_fields"]
        passages = (Passage(**dict(zip(names, values, strict=True))) for values in content["passages"])
        return FidelityReport(content["about"], tuple(passages))

    return read_json(path, FORMAT, "report of --fidelity", build)


COLUMNS: tuple[Column[Row], ...] = (
    Column("length", lambda row: tokens(row.length)),
    Column("policy", lambda row: row.policy, False),
    Column("budget", lambda row: budget_name(row.budget) or "all", False),
    Column("n", lambda row: str(row.n)),
    Column("perplexity", lambda row: f"{row.perplexity:.2f}"),
    Column("/ full", lambda row: "-" if row.ratio is None else row.ratio.text(4)),
    Column("KL to full", lambda row: row.kl.text(4)),
    Column("same best token", lambda row: row.agreement.text(3)),
    Column("same tokens generated", lambda row: "-" if row.same_tokens is None else row.same_tokens.text(1)),
    Column("attended", lambda row: f"{row.attended:.0f}"),
    Column("of the best", lambda row: number(row.best_recall, 2)),
    Column("output error", lambda row: number(row.output_error, 3)),
)


def _exp(mean: Mean) -> Mean:
    return Mean(math.exp(mean.value), math.exp(mean.low), math.exp(mean.high), mean.n)


def _head_means(found: Sequence[list[list[float]]]) -> list[list[float]] | None:
    """Over passages, by layer and query head; None where none was measured."""
    if not found:
        return None
    return [
        [round(fmean(head), 4) for head in zip(*layer, strict=True)] for layer in zip(*found, strict=True)
    ]
