"""`python fake_worker_process.py FLAGS...`: the worker's real main with a fake engine and without torch.

FAKE_ENGINE in the environment: `endless`, `dies` at the first step, `hangs` in it, `loads` for ever.
"""

import os
import sys
import threading
import types

from fake_engine import FakeEngine


def build_engine(config, report, traces):
    kind = os.environ.get("FAKE_ENGINE", "")
    report("load weights", 1, 1)
    if kind == "loads":
        threading.Event().wait(60)
    engine = FakeEngine()
    engine.endless = kind == "endless"
    engine.error = ZeroDivisionError("broken") if kind == "dies" else None
    engine.step_seconds = 600 if kind == "hangs" else engine.step_seconds
    runner = types.SimpleNamespace(offloader=types.SimpleNamespace(sessions=None))
    return types.SimpleNamespace(engine=engine, runner=runner)


class WarmUp:
    def __init__(self, engine, prefill_chunk, report, policies):
        self._report = report

    def run(self, is_stopped):
        self._report(1, 1)


def fake_module(name, **attributes):
    module = types.ModuleType(name)
    vars(module).update(attributes)
    sys.modules[name] = module


fake_module("torch", set_num_threads=lambda count: None)
fake_module("gpu_worker.startup.build", build_engine=build_engine)
fake_module("gpu_worker.startup.warm.warmup", WarmUp=WarmUp)

if __name__ == "__main__":
    from gpu_worker.__main__ import main

    sys.exit(main(sys.argv[1:]))
