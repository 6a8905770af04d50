"""Imports run one way (docs/architecture.md), and no loader that runs foreign code is used anywhere."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from checkout import sources

OURS = ("benchmarks", "carrel", "examples", "gateway", "gpu_worker", "kv_store", "tests", "tools")
CODE_LOADERS = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
LOADING_WORDS = (*CODE_LOADERS, "_pyobj", "torch.load", "trust_remote_code")
# what processes can be told; importing it loads nothing heavy, by a test of the command
OPTIONS = ("gpu_worker.config", "kv_store.config")
STUBS = ("gateway.v1", "gpu_worker.v1", "kv_store.v1")


@dataclass(frozen=True)
class Rule:
    """Imports that the files of one folder may make of ours, and those of other packages that they may not."""

    folder: str
    may_import: tuple[str, ...]
    banned: frozenset[str] = frozenset()
    except_folder: str = ""


HEAVY = frozenset({"torch", "triton", "faiss", "ray", "transformers", "grpc", "numpy"})

RULES = (
    Rule("carrel/process", ("carrel.process",), HEAVY),
    Rule(
        "kv_store",
        ("kv_store", "carrel.process"),
        frozenset({"torch", "triton", "transformers", "tokenizers", "fastapi", "uvicorn"}),
        except_folder="kv_store/client",
    ),
    Rule(
        "kv_store/client",
        ("kv_store.client", "kv_store.v1", "carrel.process"),
        frozenset({"ray", "faiss", "torch", "triton", "transformers"}),
    ),
    Rule(
        "gpu_worker",
        ("gpu_worker", "kv_store.client", "kv_store.v1", "carrel.process"),
        frozenset({"transformers", "tokenizers", "fastapi", "starlette", "uvicorn"}),
    ),
    # It decides by numbers and clocks: no tensors.
    Rule("gpu_worker/engine", ("gpu_worker", "carrel.process"), HEAVY),
    Rule(
        "gateway",
        ("gateway", "gpu_worker.v1", "carrel.process"),
        frozenset({"torch", "triton", "faiss", "ray"}),
    ),
    Rule("carrel", ("carrel", "gateway", *OPTIONS, *STUBS), except_folder="carrel/cluster"),
    Rule(
        "carrel/cluster",
        ("carrel", "gateway", "kv_store", *OPTIONS, *STUBS),
        frozenset({"torch", "triton", "faiss"}),
    ),
)

# The rooms of gpu_worker, each a file or a folder, from the ground up: a room imports those before it only. Programs
# (`__main__`) are one room, wherever they lie.
FLOORS = (
    "errors",
    "v1",
    "row_format",
    "kernels",
    "device",
    "records",
    "layers",
    "memory",
    "models",
    "sampling",
    "grammar",
    "policies",
    "neighbours",
    "selection",
    "config",
    "engine",
    "state",
    "store",
    "caches",
    "calibration",
    "runner",
    "startup",
    "fidelity",
    "service",
    "__main__",
)


def package_of(name: str) -> str:
    """Return the dotted name of a file's folder."""
    return name.rpartition("/")[0].replace("/", ".")


def imported_modules(tree: ast.AST, package: str) -> Iterator[str]:
    """Dotted names of all imports at any depth, relative ones and literal import_module included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield from (str(arg.value) for arg in node.args[:1] if isinstance(arg, ast.Constant))


def is_within(module: str, allowed: str) -> bool:
    return module == allowed or module.startswith(f"{allowed}.")


def broken_imports(rule: Rule, source: str, package: str) -> list[str]:
    """The imports of one file that `rule` forbids."""
    broken = []
    for module in imported_modules(ast.parse(source), package):
        top = module.partition(".")[0]
        is_foreign = top in OURS and not any(is_within(module, allowed) for allowed in rule.may_import)
        if is_foreign or top in rule.banned:
            broken.append(module)
    return broken


def room_of(module: str) -> str:
    """The room of a dotted name: `engine` of `gpu_worker.startup.build`; "" of the package itself."""
    _, *parts = module.split(".")
    return "__main__" if "__main__" in parts else "".join(parts[:1])


def room_of_file(name: str) -> str:
    return room_of(name.removesuffix(".py").replace("/", ".").removesuffix(".__init__"))


def other_rooms(source: str, package: str, room: str) -> set[str]:
    """Rooms of the package that a file of `room` imports; `package`: the dotted name of the file's folder."""
    top = package.partition(".")[0]
    modules = imported_modules(ast.parse(source), package)
    return {room_of(module) for module in modules if is_within(module, top)} - {"", room}


def imports_upwards(source: str, package: str, room: str) -> list[str]:
    """Rooms that a file of gpu_worker may not import: those that do not stand before its own."""
    assert room in FLOORS, f"{room} is a new room of gpu_worker: give it a floor in FLOORS"
    below = FLOORS[: FLOORS.index(room)]
    return sorted(other for other in other_rooms(source, package, room) if other not in below)


def circles(arrows: dict[str, set[str]]) -> list[str]:
    """Return the nodes that remain when those without arrows into the rest are removed again and again."""
    left = dict(arrows)
    while free := [room for room, others in left.items() if not others & left.keys()]:
        for room in free:
            del left[room]
    return sorted(left)


def is_torch_load(function: ast.expr) -> bool:
    # without the text of every call of the tree, which took most of the test's time
    return (
        isinstance(function, ast.Attribute)
        and function.attr == "load"
        and ast.unparse(function) == "torch.load"
    )


def loads_code(source: str) -> list[str]:
    """Uses of pickle and its like in one file."""
    # Few files have any of the words, and to parse them all takes most of the test's time.
    if not any(word in source for word in LOADING_WORDS):
        return []
    tree = ast.parse(source)
    found = [name for name in imported_modules(tree, "") if name.partition(".")[0] in CODE_LOADERS]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("recv_pyobj", "send_pyobj"):
            found.append(ast.unparse(node))
        elif isinstance(node, ast.Call) and is_torch_load(node.func):
            keywords = [ast.unparse(keyword) for keyword in node.keywords]
            found += [] if "weights_only=True" in keywords else ["torch.load"]
        elif isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "trust_remote_code"):
            found += [ast.unparse(node)] if ast.unparse(node.value) != "False" else []
    return found


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.folder)
def test_imports_run_one_way(rule: Rule) -> None:
    broken = {}
    for name, text in sources(rule.folder):
        if rule.except_folder and name.startswith(f"{rule.except_folder}/"):
            continue
        if modules := broken_imports(rule, text, package_of(name)):
            broken[name] = modules
    assert broken == {}


def test_the_engine_loads_no_tensors() -> None:
    program = "import sys, gpu_worker.engine.engine; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert not {"torch", "triton", "faiss"} & {*loaded.stdout.split()}


def test_inside_gpu_worker_imports_run_downwards() -> None:
    broken = {
        name: upwards
        for name, text in sources("gpu_worker")
        if (room := room_of_file(name)) and (upwards := imports_upwards(text, package_of(name), room))
    }
    assert broken == {}


@pytest.mark.parametrize("package", ["gateway", "gpu_worker", "kv_store"])
def test_no_rooms_of_a_package_import_each_other_in_a_circle(package: str) -> None:
    arrows: dict[str, set[str]] = {}
    for name, text in sources(package):
        room = room_of_file(name)
        arrows.setdefault(room, set()).update(other_rooms(text, package_of(name), room))
    assert circles(arrows) == []


@pytest.mark.parametrize(
    ("folder", "room", "source"),
    [
        ("gpu_worker/state", "state", "from gpu_worker.store.offload import Offloader"),
        ("gpu_worker", "records", "from gpu_worker.engine import Engine"),
        ("gpu_worker/store", "store", "def f():\n    from gpu_worker import caches"),
        ("gpu_worker/kernels", "kernels", "from ..policies.base import Plan"),
        ("gpu_worker/service", "service", "import gpu_worker.calibration.__main__"),
        ("gpu_worker/engine", "engine", "from gpu_worker.somewhere import anything"),
    ],
)
def test_an_upward_import_is_seen(folder: str, room: str, source: str) -> None:
    assert imports_upwards(source, folder.replace("/", "."), room) != []


def test_a_circle_is_seen() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}, "e": set()}) == ["a", "b", "c", "d"]
    assert circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_nothing_loads_code_from_data() -> None:
    found = {name: uses for name, text in sources(*OURS) if (uses := loads_code(text))}
    assert found == {}


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("gateway", "def f():\n    import torch.nn"),
        ("gateway", "from gpu_worker.engine import records"),
        ("gateway", "import importlib\nimportlib.import_module('ray')"),
        ("kv_store/client", "from ..arena import Arena"),
        ("kv_store/client", "import faiss"),
        ("kv_store", "import torch"),
        ("gpu_worker", "from transformers import AutoTokenizer"),
        ("gpu_worker", "import kv_store.arena"),
        ("carrel", "import gpu_worker.engine"),
        ("carrel/process", "from carrel.errors import CarrelError"),
        ("gateway", "from carrel.serve.process import Child"),
    ],
)
def test_the_rule_sees_a_breach(folder: str, source: str) -> None:
    rule = next(rule for rule in RULES if rule.folder == folder)
    assert broken_imports(rule, source, folder.replace("/", ".")) != []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "socket.recv_pyobj()",
        "np.load(f, allow_pickle=True)",
    ],
)
def test_code_loaders_are_seen(source: str) -> None:
    assert loads_code(source) != []
