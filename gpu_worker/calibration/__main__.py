"""`python -m gpu_worker.calibration MODEL ...`: prefills samples of token ids and writes the calibration's file."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import torch

from carrel.process.command_line import Parser
from carrel.process.events import ProcessEvents
from carrel.process.logs import log_to_stderr
from carrel.process.version import version
from gpu_worker.__main__ import EXIT_UNUSABLE, available_cores
from gpu_worker.calibration import ModelFacts, Observation, observe, write_calibration
from gpu_worker.calibration.observe import most_outlying
from gpu_worker.config import Dtype, find_device, find_dtype
from gpu_worker.errors import ConfigError, ModelError
from gpu_worker.models import LoadedModel, load_model


def main(argv: Sequence[str]) -> int:
    """Returns the exit status: 0, or 2 with one line on stderr for what cannot be used."""
    log_to_stderr("gpu_worker", log_format="text")
    try:
        arguments = parser().parse_args(argv)
        events = ProcessEvents("gpu_worker", arguments.json_events)
        device = torch.device(find_device(arguments.device))
        dtype = find_dtype(arguments.dtype, device.type)
        torch.set_num_threads(arguments.threads or available_cores())
        samples = read_samples(arguments.samples)
        model = _load(arguments.model, arguments.revision, device, dtype, events)
        check_samples(samples, model)
        observation = _observe(model, samples, arguments.threshold, events)
        about = {
            "model": arguments.name or arguments.model,
            "num_samples": str(len(samples)),
            "num_tokens": str(sum(map(len, samples))),
            "threshold": str(arguments.threshold),
            "dtype": str(model.decoder.dtype).removeprefix("torch."),
            "carrel_version": version(),
            "torch_version": str(torch.__version__),
        }
        write_calibration(arguments.out, ModelFacts.of(model.config), observation, about)
        events.status(describe_outliers(observation, arguments.share))
    except (ConfigError, ModelError) as error:
        print(f"gpu_worker: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_UNUSABLE
    return 0


def parser() -> Parser:
    made = Parser(
        prog="python -m gpu_worker.calibration",
        description="What `carrel calibrate` starts.",
    )
    made.add_argument("model", metavar="MODEL", help="model directory, GGUF file or hub id")
    made.add_argument(
        "--samples", type=Path, required=True, metavar="FILE", help="JSON, one list of token ids a line"
    )
    made.add_argument("--out", type=Path, required=True, metavar="FILE", help="safetensors file to write")
    made.add_argument("--name", metavar="NAME", help="the model's, in the file (as given)")
    made.add_argument(
        "--threshold", type=float, default=0.8, metavar="X", help="cosine of a near duplicate (0.8)"
    )
    made.add_argument(
        "--share", type=float, default=0.04, metavar="X", help="of outlier heads to name (0.04)"
    )
    made.add_argument("--device", default="auto", metavar="X", help="auto, cpu, cuda or cuda:INDEX (auto)")
    made.add_argument(
        "--dtype",
        default="auto",
        choices=get_args(Dtype),
        help="auto: float32 on a CPU, else the checkpoint's",
    )
    made.add_argument("--threads", type=int, metavar="N", help="CPU threads for torch (all cores)")
    made.add_argument("--revision", metavar="X", help="branch, tag or commit of a hub id")
    made.add_argument("--json-events", action="store_true", help="one JSON object a line on stdout")
    return made


def read_samples(path: Path) -> list[list[int]]:
    """Raises ConfigError for a file that does not hold lists of token ids."""
    try:
        samples = [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"--samples {path} cannot be read: {error}") from error
    if not samples or not all(isinstance(sample, list) and sample for sample in samples):
        raise ConfigError(f"--samples {path} must hold one list of token ids a line")
    if not all(type(token_id) is int for sample in samples for token_id in sample):
        raise ConfigError(f"--samples {path} holds token ids that are no whole numbers")
    return samples


def check_samples(samples: Sequence[Sequence[int]], model: LoadedModel) -> None:
    """Raises ConfigError for samples that are not this model's."""
    longest, most = max(map(len, samples)), model.config.max_model_len
    if longest > most:
        raise ConfigError(f"--length {longest} exceeds the model's {most} tokens; give at most that")
    if not all(0 <= token_id < model.config.vocab_size for sample in samples for token_id in sample):
        raise ConfigError(
            f"a token id lies outside the model's vocabulary of {model.config.vocab_size}: "
            "its tokenizer is another model's"
        )


def describe_outliers(observation: Observation, share: float) -> str:
    """The most outlying heads with their scores, as one line."""
    scores = observation.outlier_scores
    heads = sorted(most_outlying(scores, share), key=lambda head: (-float(scores[head]), head))
    named = ", ".join(f"layer {layer} head {head} ({scores[layer, head]:.3f})" for layer, head in heads)
    return (
        f"outlier heads, {len(heads)} of {scores.numel()}: {named or 'none'}; "
        f"the mean score is {scores.mean():.3f}"
    )


def _load(
    model: str, revision: str | None, device: torch.device, dtype: str | None, events: ProcessEvents
) -> LoadedModel:
    try:
        return load_model(
            model,
            device=device,
            dtype=getattr(torch, dtype) if dtype else None,
            revision=revision,
            progress=lambda done, total: events.progress("load weights", done, total),
        )
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"the weights do not fit {device}: take a smaller model or --device cpu") from error


def _observe(
    model: LoadedModel, samples: Sequence[Sequence[int]], threshold: float, events: ProcessEvents
) -> Observation:
    try:
        return observe(
            model.decoder, samples, threshold, lambda done, total: events.progress("calibrate", done, total)
        )
    except torch.OutOfMemoryError as error:
        longest = max(map(len, samples))
        raise ConfigError(
            f"no device memory is left for samples of {longest} tokens: give a smaller --length"
        ) from error
    except ValueError as error:
        raise ConfigError(str(error)) from error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
