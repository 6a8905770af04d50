"""Every method, a line each. Nothing of a method is imported, nor torch, until its policy is made."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from carrel.process.policy_names import choices
from gpu_worker.policies.hyper_parameters import with_options

if TYPE_CHECKING:
    from gpu_worker.policies.base import Policy

# The policy that stands for `full` or for the one of long contexts, by the request's length.
AUTO = "auto"
# The policy of short contexts, and of long ones and of requests that name none.
SHORT, LONG = "full", "bitkeys"
# There once the worker has a file of `carrel calibrate`.
OUTLIERS = "chelsea+outliers"


@dataclass(frozen=True, slots=True)
class Method:
    """A line of the registry: `policies/<folder>/policy.py` has the class; the folder is the name, if not given.

    variants: other forms of the method; ablations: its paper's, the method with one part left out or of another kind.
    Both are served as `name+key`, and differ in these fields. wrappers: the ends of the names by which it is served in
    allocations, the innermost first.
    """

    name: str
    cls: str
    folder: str = ""
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    ablations: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    wrappers: tuple[str, ...] = ()

    def names(self) -> Iterator[str]:
        yield self.name
        for end in (*self.variants, *self.ablations, *self.wrappers):
            yield f"{self.name}+{end}"


# Of a method that scores tokens.
SCORED = ("adakv", "layerwise", "adakv+layerwise")

METHODS: tuple[Method, ...] = (
    Method("full", "Full"),
    Method("oracle", "Oracle"),
    Method("pqcache", "PQCache", ablations={"ip": {"metric": "ip", "names_metric": True}}),
    Method(
        "clusterkv",
        "ClusterKV",
        ablations={metric: {"metric": metric, "names_metric": True} for metric in ("l2", "ip")},
    ),
    Method("quest", "Quest"),
    Method("infinigen", "InfiniGen"),
    Method("sparq", "SparQ"),
    Method("bitkeys", "BitKeys"),
    Method("infllm", "InfLLM", variants={"sparse": {"sparse_prefill": True}}),
    Method("streaming_llm", "StreamingLLM"),
    Method("h2o", "H2O", wrappers=SCORED),
    Method("h2o_c", "H2OCompensated", folder="h2o"),
    Method("scissorhands", "Scissorhands"),
    Method("snapkv", "SnapKV", wrappers=SCORED),
    Method("pyramidkv", "PyramidKV"),
    Method(
        "semantickv",
        "SemanticKV",
        ablations={
            "no_sinks": {"reserve_sinks": False},
            "no_recent": {"reserve_recent": False},
            "random": {"by_norm": False},
            "shared": {"head_wise": False},
            "corrected": {"count_corrected": True},
        },
        wrappers=SCORED,
    ),
    Method(
        "protokv",
        "ProtoKV",
        ablations={"chunks": {"hash_prototypes": False}, "hashes": {"chunk_prototypes": False}},
        wrappers=SCORED,
    ),
    Method("nacl", "NACL", wrappers=SCORED),
    Method("cam", "CaM"),
    Method("chelsea", "Chelsea", ablations={"unchunked": {"chunked": False}}, wrappers=("layerwise",)),
)

# Classes of the allocations, whose folders have their names.
ALLOCATIONS = {"adakv": "AdaKV", "layerwise": "LayerWise"}


def names(calibrated: bool = False) -> tuple[str, ...]:
    """List the names of all policies, each method before its ablations. calibrated: with a calibration.

    Raises ValueError when a name stands there twice.
    """
    own = (name for method in METHODS for name in method.names())
    return _once((*own, *((OUTLIERS,) if calibrated else ())))


def ablations() -> dict[str, str]:
    """The names of all ablations, and of the method that each is of."""
    return {f"{method.name}+{end}": method.name for method in METHODS for end in method.ablations}


def option_names(calibrated: bool = False) -> tuple[str, ...]:
    """List the methods and allocations whose hyper-parameters may be set; variants and wrapped forms follow them.
    calibrated: with a calibration."""
    own = (method.name for method in METHODS)
    return (*own, *ALLOCATIONS, *((OUTLIERS,) if calibrated else ()))


def check_name(name: str, calibrated: bool = False) -> None:
    """Raises ValueError, with the plain names and the nearest one, for a name that no policy has. calibrated: with a
    calibration."""
    known = (AUTO, *names(calibrated))
    if name not in known:
        raise ValueError(f"unknown policy {name!r}; {choices(name, sorted(known))}")


def check_allowed(allowed: Collection[str], default: str, calibrated: bool = False) -> None:
    """Raises ValueError unless all of these exist, and the server's default is one of them; with `auto` also what that
    chooses of. None at all: everything is allowed."""
    for name in allowed:
        check_name(name, calibrated)
    if allowed and default not in allowed:
        raise ValueError(f"{default!r}, of --policy, is none of them; add it, or choose another --policy")
    chosen = SHORT, LONG
    if AUTO in allowed and (missing := set(chosen).difference(allowed)):
        raise ValueError(f"auto chooses {' or '.join(chosen)}; add {' and '.join(sorted(missing))} too")


def registry(*given: Policy, options: Mapping[str, Mapping[str, str]] | None = None) -> dict[str, Policy]:
    """The policies by name: those given, and every other one with its paper's defaults. Variants, ablations and
    wrapped policies have the other fields of the method that is given. options: texts of fields, by `option_names`.

    Raises ValueError when two have the same name, and for an option that cannot be used.
    """
    _once(policy.name for policy in given)
    by_name = {policy.name: policy for policy in given}
    texts = options or {}
    for method in METHODS:
        made = by_name.get(method.name) or _make(method.folder or method.name, method.cls)
        policy = by_name[method.name] = with_options(made, texts.get(method.name, {}))
        forms: Any = policy
        for end, fields in (*method.variants.items(), *method.ablations.items()):
            _add(by_name, f"{method.name}+{end}", replace(forms, **fields))
        for end in method.wrappers:
            wrapped = policy
            for name in end.split("+"):
                wrapped = with_options(_make(name, ALLOCATIONS[name], wrapped), texts.get(name, {}))
            _add(by_name, f"{method.name}+{end}", wrapped)
    return by_name


def _add(by_name: dict[str, Policy], name: str, policy: Policy) -> None:
    if policy.name != name:
        raise ValueError(f"the registry has {policy.name!r} as {name!r}")
    by_name.setdefault(name, policy)


def _make(folder: str, cls: str, *inner: Policy) -> Policy:
    made = getattr(import_module(f"gpu_worker.policies.{folder}.policy"), cls)(*inner)
    return cast("Policy", made)


def _once(every: Iterable[str]) -> tuple[str, ...]:
    """The names, in their order. Raises ValueError when one stands there twice."""
    listed = tuple(every)
    for name in listed:
        if listed.count(name) > 1:
            raise ValueError(f"two policies are named {name!r}")
    return listed
