"""Options that Carrel no longer has, by name with underscores, and the new way of each, which refuses them."""

from __future__ import annotations

from collections.abc import Mapping

from carrel.process.options import spellings

_FIXED = "it is fixed now; leave it out"
_KEYS = "give each key its own in --api-keys-file"

REMOVED = {
    "trust_remote_code": "Carrel runs no code that a checkpoint brings; leave it out",
    "body_timeout": f"60 s, {_FIXED}",
    "write_timeout": f"30 s, {_FIXED}",
    "max_connections": "it follows from the limit of descriptors; set that with ulimit -n",
    "max_incoming_bytes": f"256 MiB, {_FIXED}",
    "max_concurrent_per_key": f"max-concurrent: {_KEYS}",
    "api_key_weights": f"weight: {_KEYS}",
    "download_dir": "set HF_HUB_CACHE to the folder",
    "prefill_stretch": f"4, {_FIXED}",
    "warmup_policies": "the policies of --allowed-policies are warmed up",
    "store_patience": f"10 s, {_FIXED}",
    "least_budget": "512 tokens, fixed now; give --budget a number of tokens for less",
    "outlier_share": "--policy-options chelsea+outliers:share=SHARE",
    "pq_subvectors": "--policy-options pqcache:num_subvectors=N",
    "pq_bits": "--policy-options pqcache:num_bits=N",
    "pq_iterations": "--policy-options pqcache:max_iterations=N",
    "pq_metric": "--policy-options pqcache:metric=NAME",
    "clusterkv_tokens_per_cluster": "--policy-options clusterkv:tokens_per_cluster=N",
    "clusterkv_metric": "--policy-options clusterkv:metric=NAME",
    "default_iterations": f"10, {_FIXED}",
    "max_points_per_centroid": f"128, {_FIXED}",
}

# Options of one process alone, which may read the same environment as the others: only commands that start all three
# refuse them.
MOVED = {
    "granularity": "give it to carrel eval, or to python -m gpu_worker",
    "lease_seconds": "give it to python -m kv_store; carrel serve has 30 s",
}


def removed(kind: type) -> Mapping[str, str]:
    """The new way of each name that options of this kind no longer have. `starts_all`, a field of the class, adds those
    that one process still has."""
    gone = REMOVED | MOVED if getattr(kind, "starts_all", False) else REMOVED
    known = spellings(kind)
    return {name: way for name, way in gone.items() if name not in known}
