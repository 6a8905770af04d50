"""`python -m gpu_worker.policies`: every policy as a line of JSON."""

from __future__ import annotations

import json
from dataclasses import asdict

from gpu_worker.policies.registry import registry
from gpu_worker.policies.table import methods


def main() -> None:
    for method in methods(registry()):
        print(json.dumps(asdict(method)))


if __name__ == "__main__":
    main()
