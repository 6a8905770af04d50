"""Loglikelihoods that `lm_eval` gets from a server. Arguments: its URL and the tokenizer; items as JSON on stdin."""

from __future__ import annotations

import json
import sys

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI


def main() -> None:
    url, tokenizer = sys.argv[1:]
    items = json.load(sys.stdin)
    model = LocalCompletionsAPI(
        model="carrel-nano",
        base_url=f"{url}/v1/completions",
        tokenizer=tokenizer,
        tokenizer_backend="huggingface",
        batch_size=4,
        max_length=2048,
    )
    requests = [
        Instance("loglikelihood", {}, (context, following), at)
        for at, (context, following) in enumerate(items)
    ]
    print(json.dumps(model.loglikelihood(requests)))


if __name__ == "__main__":
    main()
