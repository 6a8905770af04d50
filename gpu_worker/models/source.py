"""From what the user typed, a path or a Hugging Face hub id, to a local model directory."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import snapshot_download

from gpu_worker.errors import ModelError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
# nested folders hold other formats of the same weights, as does consolidated.safetensors
_OTHER_FORMATS = ["*/*", "consolidated*"]


def resolve_source(
    path_or_id: str, *, revision: str | None, download_dir: str | None, with_weights: bool
) -> Path:
    """The model's directory; of a hub id, JSON and (`with_weights`) safetensors come from cache or network.

    An existing directory wins over a hub id, and `revision` and `download_dir` mean nothing to it.
    HF_HUB_OFFLINE, HF_HOME and HF_TOKEN are respected. ModelError names the id and what to do.
    """
    path = Path(path_or_id).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ModelError(f"{path_or_id} is a file; give the model's directory, which holds config.json")
    if not _HUB_ID.fullmatch(path_or_id):
        raise ModelError(f"{path_or_id} is no directory, nor the id of a model such as 'org/name'")
    try:
        directory = snapshot_download(
            path_or_id,
            revision=revision,
            cache_dir=download_dir,
            allow_patterns=["*.json", "*.safetensors"] if with_weights else ["*.json"],
            ignore_patterns=_OTHER_FORMATS,
        )
    # the hub client's HTTP stack differs between its versions, and each has errors of its own
    except Exception as exc:
        at = f" at revision {revision!r}" if revision else ""
        raise ModelError(
            f"{path_or_id!r} is no local directory, and as a Hugging Face id{at} it cannot be downloaded "
            f"({type(exc).__name__}). Check the name, the network and HF_HUB_OFFLINE; set HF_TOKEN for a "
            "gated model; or download it elsewhere and give its directory"
        ) from exc
    return Path(directory)
