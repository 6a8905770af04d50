"""The job of a measurement, as a file gives it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from gpu_worker.errors import ConfigError

FULL = "full"


@dataclass(frozen=True, slots=True)
class Setting:
    """A policy and its budget: up to 1 a share of the prefilled tokens, above 1 a number of tokens."""

    policy: str
    budget: float


@dataclass(frozen=True, slots=True)
class Job:
    """documents: token ids, of which the last `num_forced` go through decode steps. settings: compared with `full`,
    which is not among them. num_generated: tokens that are generated from each document's context too.
    num_together: documents side by side; of each the logits of every forced token are kept. measured: places of
    documents of which the attention outputs are compared too, which slows every step."""

    documents: tuple[tuple[int, ...], ...]
    settings: tuple[Setting, ...]
    num_forced: int
    num_generated: int
    num_together: int = 4
    measured: tuple[int, ...] = ()


def read_job(path: Path) -> Job:
    """From JSON. Raises ConfigError for what is none."""
    try:
        content = json.loads(path.read_text())
        settings = tuple(Setting(policy, float(budget)) for policy, budget in content.pop("settings"))
        documents = tuple(tuple(map(int, document)) for document in content.pop("documents"))
        measured = tuple(content.pop("measured", ()))
        job = Job(documents=documents, settings=settings, measured=measured, **content)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"--job {path} is no job: {error}") from error
    if job.num_forced < 2 or not all(len(document) > job.num_forced for document in job.documents):
        raise ConfigError(
            f"--job {path}: {job.num_forced} forced tokens; give two at least, and documents with more"
        )
    return job
