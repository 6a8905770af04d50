"""Runs `python -m gpu_worker.fidelity` beside a store of its own, and reads what it found."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from carrel.evaluation.fidelity.report import Passage
from carrel.evaluation.local import local_store, own_environment
from carrel.serve.children import other_program, worker_spec
from carrel.serve.one_shot import run_to_end

MODULE = "gpu_worker.fidelity"


@dataclass(frozen=True)
class Job:
    """passages: token ids by length and index, in the order in which they are measured; of each the last `num_forced`
    go through decode steps. settings: policies and budgets beside `full`. num_together: passages side by side.
    num_measured: of the passages with a lower index the attention outputs are compared, too."""

    passages: Mapping[tuple[int, int], Sequence[int]]
    settings: Sequence[tuple[str, float]]
    num_forced: int
    num_generated: int
    num_together: int
    limit_seconds: float | None
    num_measured: int = 0


def measure(model: str, texts: Mapping[str, str], job: Job, notes: Console) -> list[Passage]:
    """Measure until the job is done, or its time is up. Main thread only.

    texts: options of the store and the worker, by field. Raises OptionError and ChildError.
    """
    with local_store(texts, lambda text: notes.print(text, highlight=False)) as endpoints:
        job_file, out = endpoints.run / "job.json", endpoints.run / "found.jsonl"
        job_file.write_text(json.dumps(_content(job)))
        own = ["--job", str(job_file), "--out", str(out)]
        if job.limit_seconds is not None:
            own += ["--limit-seconds", f"{job.limit_seconds:.0f}"]
        spec = other_program(worker_spec(model, texts, endpoints), MODULE, own)
        run_to_end(spec, own_environment(os.environ), notes)
        return _read(out, list(job.passages), notes)


def _content(job: Job) -> dict[str, Any]:
    return {
        "documents": [list(token_ids) for token_ids in job.passages.values()],
        "settings": list(job.settings),
        "num_forced": job.num_forced,
        "num_generated": job.num_generated,
        "num_together": job.num_together,
        "measured": [place for place, (_, index) in enumerate(job.passages) if index < job.num_measured],
    }


def _read(out: Path, keys: Sequence[tuple[int, int]], notes: Console) -> list[Passage]:
    found = []
    for line in out.read_text().splitlines():
        values = json.loads(line)
        length, index = keys[values.pop("document")]
        if error := values.pop("error"):
            setting = f"{values['policy']} {values['budget']}"
            notes.print(f"left out: {length} {setting}: {error}", markup=False, highlight=False)
            continue
        if errors := values["output_errors"]:
            values["output_errors"] = [[round(error, 4) for error in layer] for layer in errors]
        found.append(Passage(length=length, index=index, **values))
    return found
