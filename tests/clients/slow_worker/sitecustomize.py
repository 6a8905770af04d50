"""A worker whose prompts take 8 s more and whose steps take 0.1 s more. Python imports this at the start of a process
that has this folder in PYTHONPATH."""

import sys

if "gpu_worker" in sys.orig_argv:
    import time
    from typing import Any

    from gpu_worker.runner.steps.decode import DecodeStep
    from gpu_worker.startup import assemble

    make_usual, run_step = assemble.usual_prefill, DecodeStep.run

    def make_slow(*of_worker: Any) -> Any:
        make = make_usual(*of_worker)

        def made(*of_prompts: Any) -> Any:
            time.sleep(8.0)
            return make(*of_prompts)

        return made

    def run_slowly(step: DecodeStep, *arguments: Any) -> Any:
        time.sleep(0.1)
        return run_step(step, *arguments)

    assemble.usual_prefill = make_slow
    DecodeStep.run = run_slowly  # type: ignore[method-assign]
