"""Names of functions for the model, which knows no namespaces, and for the client, which does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from gateway.rest.responses.schemas import OfferedTool


@dataclass(frozen=True, slots=True)
class FunctionName:
    """The client's name of a function. `namespace` None: the function is in none."""

    name: str
    namespace: str | None = None


class FunctionNames:
    """One name for the model of each function that a request offers.

    A function in a namespace keeps its name where no other function has it. Otherwise the namespace precedes it.
    """

    def __init__(self, tools: Iterable[OfferedTool] = ()) -> None:
        offered = [name for tool in tools for name in _names(tool)]
        num_named = Counter(each.name for each in dict.fromkeys(offered))
        self._flat = {each: each.name for each in offered if each.namespace is None}
        taken = set(self._flat.values())
        for each in offered:
            if each not in self._flat:
                flat = each.name if num_named[each.name] == 1 else f"{each.namespace}__{each.name}"
                while flat in taken:
                    flat += "_"
                taken.add(flat)
                self._flat[each] = flat
        self._own = {flat: name for name, flat in self._flat.items()}

    def flat(self, name: str, namespace: str | None = None) -> str:
        """Return the model's name of a function; one that is not offered keeps its own."""
        return self._flat.get(FunctionName(name, namespace), name)

    def own(self, flat: str) -> FunctionName:
        """Return the client's name of a function that the model called."""
        return self._own.get(flat, FunctionName(flat))


def _names(tool: OfferedTool) -> list[FunctionName]:
    if tool.type == "namespace":
        return [FunctionName(each.name, tool.name) for each in tool.tools or ()]
    return [FunctionName(tool.name)]
