"""`carrel calibrate`: what some policies must know of a model beforehand, measured on texts and written to a file."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from carrel.calibration import calibrate, cut_samples
from carrel.machine import require
from carrel.process.command_line import at_least, flag, new_file
from carrel.serve.children import child_environment
from carrel.serve.model import find_model

if TYPE_CHECKING:
    from gateway.tokenizer import Tokenizer

# beyond this command's own
LIBRARIES = ("transformers", "torch", "safetensors")
DTYPES = ("auto", "float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "`carrel serve --calibration FILE` takes the file; docs/cli.md says which policies read it."
    )
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="model directory, GGUF file or Hugging Face id (default: carrel-nano)",
    )
    flag(parser, "--text", "UTF-8 texts, plain or .xz", parse=Path, metavar="FILE", nargs="+", required=True)
    flag(parser, "--out", "safetensors file to write", parse=new_file, metavar="FILE", required=True)
    flag(parser, "--tokens", "tokens of all samples, spread evenly over the texts", 32768, at_least(256))
    flag(parser, "--length", "of one sample", 4096, at_least(256))
    flag(
        parser,
        "--threshold",
        "cosine below which a token has no near duplicate",
        0.8,
        _between(-1, 1),
        metavar="X",
    )
    flag(
        parser,
        "--share",
        "of all KV heads, how many outliers to name; the file holds every score",
        0.04,
        _between(0, 1),
        metavar="X",
    )
    parser.add_argument("--device", default="auto", metavar="DEVICE", help="auto, cpu, cuda or cuda:N")
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=DTYPES,
        metavar="TYPE",
        help="auto: float32 on a CPU, else bfloat16",
    )
    flag(parser, "--threads", "on a CPU (default: all)", parse=at_least(1))
    flag(parser, "--revision", "branch, tag or commit of a Hub model", metavar="NAME")


def run(arguments: argparse.Namespace) -> int:
    """The outlier heads go to stdout, progress to stderr. Raises CarrelError."""
    notes = Console(stderr=True)
    model = find_model(arguments.model)
    require("calibrate", LIBRARIES, "'carrel[gateway,gpu-worker]'")
    tokenizer = _tokenizer(model, arguments.revision)
    notes.print("cut samples", highlight=False)
    samples = cut_samples(arguments.text, tokenizer, arguments.tokens, arguments.length)
    num_tokens = sum(map(len, samples))
    notes.print(f"{len(samples)} samples, {num_tokens} tokens in all", highlight=False)
    flags = {
        "--out": arguments.out.absolute(),
        "--name": Path(model).name if Path(model).exists() else model,
        "--threshold": arguments.threshold,
        "--share": arguments.share,
        "--device": arguments.device,
        "--dtype": arguments.dtype,
        "--threads": arguments.threads,
        "--revision": arguments.revision,
    }
    arguments.out.absolute().parent.mkdir(parents=True, exist_ok=True)
    for line in calibrate(model, samples, flags, child_environment(os.environ), notes):
        print(line)
    notes.print(f"wrote {arguments.out}", highlight=False)
    return 0


def _tokenizer(model: str, revision: str | None) -> Tokenizer:
    # imports transformers, which help needs not
    from gateway.tokenizer import load_tokenizer, resolve_model_dir

    return load_tokenizer(resolve_model_dir("MODEL", model, revision), None)


def _between(low: float, high: float) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = float(text)
        # the negated form also refuses NaN
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} is not from {low} to {high}")
        return value

    return number
