"""Options of vLLM and SGLang that `carrel serve` lacks, each with its counterpart here."""

from __future__ import annotations

from collections.abc import Iterable

_ONE_GPU = "a worker has one GPU; `carrel deploy` runs several workers"
_ALWAYS = "that is always so; leave it out"
_UNLOGGED = "prompts are in no log; leave it out"
_ARENA = "host memory for keys and values is --arena-bytes"

ELSEWHERE = {
    "--tensor-parallel-size": _ONE_GPU,
    "--pipeline-parallel-size": _ONE_GPU,
    "--data-parallel-size": _ONE_GPU,
    "--tp": _ONE_GPU,
    "--kv-cache-dtype": "keys and values have the type of --dtype; --policy and --budget say how many are read",
    "--swap-space": _ARENA,
    "--cpu-offload-gb": _ARENA,
    "--kv-transfer-config": _ARENA,
    "--block-size": "the store's is --slab-bytes, the device's is fixed; leave it out",
    "--enable-prefix-caching": "it is on; --prefix-cache off turns it off",
    "--no-enable-prefix-caching": "--prefix-cache off",
    "--enable-chunked-prefill": _ALWAYS,
    "--enable-auto-tool-choice": _ALWAYS,
    "--enable-prompt-tokens-details": _ALWAYS,
    "--enable-request-id-headers": _ALWAYS,
    "--enable-log-requests": _UNLOGGED,
    "--disable-log-requests": _UNLOGGED,
    "--max-log-len": _UNLOGGED,
    "--generation-config": "the model's own is read; leave it out",
    "--max-logprobs": "at most 20 may be asked for; leave it out",
    "--otlp-traces-endpoint": "--otlp-endpoint",
    "--disable-fastapi-docs": "--disable-docs",
    "--admin-api-key": "there are no control routes; leave it out",
    "--model": "the model is the first word: carrel serve MODEL",
    "--model-path": "the model is the first word: carrel serve MODEL",
    "--context-length": "--max-model-len",
    "--mem-fraction-static": "--gpu-memory-utilization",
    "--chunked-prefill-size": "--max-num-batched-tokens",
    "--max-running-requests": "--max-num-seqs",
    "--max-queued-requests": "--max-queue",
}


def remedies(unknown: Iterable[str]) -> str:
    """A line for each of these words that is such an option, `--option` or `--option=value`; empty without any."""
    names = dict.fromkeys(word.partition("=")[0] for word in unknown)
    return "".join(f"\n  {name}: {ELSEWHERE[name]}" for name in names if name in ELSEWHERE)
