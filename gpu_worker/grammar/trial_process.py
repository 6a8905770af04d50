"""`python -m gpu_worker.grammar.trial_process MODEL ID,ID... SECONDS`: compiles grammars that may well end it.

Reads a grammar a line from stdin, as JSON: [kind, text]; answers each with a line, the JSON text of why it is refused,
or null. Ends with its stdin; by SIGPROF when a grammar takes more SECONDS of processor time than that; or by what a
grammar makes llguidance do.
"""

from __future__ import annotations

import json
import random
import resource
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpu_worker.grammar.compiling import Compiler, GrammarError, reason_of
from gpu_worker.records import Grammar, GrammarKind

# Of the thread that tries: less than any of a worker's has.
STACK_BYTES = 2 << 20
MEMORY_BYTES = 8 << 30
# Of an answer at random.
NUM_TOKENS = 16


def main(model: str, eos_token_ids: str, seconds: str) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    compiler = Compiler.load(Path(model), tuple(map(int, filter(None, eos_token_ids.split(",")))))
    threading.stack_size(STACK_BYTES)
    with ThreadPoolExecutor(1) as thread:
        for line in sys.stdin:
            kind, text = json.loads(line)
            signal.setitimer(signal.ITIMER_PROF, float(seconds))
            reason = thread.submit(try_out, compiler, Grammar(GrammarKind(kind), text, "")).result()
            signal.setitimer(signal.ITIMER_PROF, 0)
            print(json.dumps(reason), flush=True)


def try_out(compiler: Compiler, grammar: Grammar) -> str | None:
    """Why a grammar is refused; None where it compiled, and an answer at random could begin."""
    try:
        matcher = compiler.matcher(grammar)
    except GrammarError as error:
        return str(error)
    generator = random.Random(0)
    for _ in range(NUM_TOKENS):
        tokens = _allowed(matcher)
        if matcher.is_stopped() or not tokens or not matcher.consume_token(generator.choice(tokens)):
            break
    return reason_of(matcher.get_error()) if matcher.is_error() else None


def _allowed(matcher: Any) -> list[int]:
    bits = matcher.compute_bitmask()
    return [8 * at + bit for at, byte in enumerate(bits) if byte for bit in range(8) if byte >> bit & 1]


if __name__ == "__main__":
    main(*sys.argv[1:])
