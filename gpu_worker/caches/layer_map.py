"""Which cache serves each layer of a model, and which layers the arena keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

# Layers that attend everything, whatever a request's policy.
FULL = "full"
# Layers that are attended as a request's policy says.
POLICY = "policy"


@dataclass(frozen=True, slots=True)
class Place:
    """cache: the name of the cache that serves a layer. index: the layer's number in that cache, from 0."""

    cache: str
    index: int


@dataclass(frozen=True, slots=True)
class LayerMap:
    """The cache of every layer. Each cache numbers its own layers from 0, in the model's order, and its tensors are as
    large. Layers of one cache need not be neighbours.

    places: by the model's layer. kept: by the model's layer, its number in the arena; None where the arena keeps no
    rows. A known prompt is reused only where all layers are kept.
    """

    places: tuple[Place, ...]
    kept: tuple[int | None, ...]

    @classmethod
    def of(cls, names: Sequence[str], unkept: Collection[str] = ()) -> LayerMap:
        """names: of each layer's cache.
        unkept: caches with rows that the arena does not keep.
        """
        counts, num_kept = Counter[str](), 0
        places, kept = [], list[int | None]()
        for name in names:
            places.append(Place(name, counts[name]))
            counts[name] += 1
            kept.append(None if name in unkept else num_kept)
            num_kept += name not in unkept
        return cls(tuple(places), tuple(kept))

    @classmethod
    def with_full(cls, num_layers: int, num_full: int = 0) -> LayerMap:
        """The first `num_full` layers attend everything; policies serve the others."""
        return cls.of([FULL if layer < num_full else POLICY for layer in range(num_layers)])

    @property
    def num_layers(self) -> int:
        return len(self.places)

    @property
    def num_kept(self) -> int:
        """Layers that the arena keeps."""
        return sum(number is not None for number in self.kept)

    @property
    def keeps_all(self) -> bool:
        return self.num_kept == self.num_layers

    @property
    def names(self) -> tuple[str, ...]:
        """Each cache once, in the order of its first layer."""
        return tuple(dict.fromkeys(place.cache for place in self.places))

    def layers_of(self, name: str) -> tuple[int, ...]:
        """The model's layers that a cache serves, in its own order."""
        return tuple(layer for layer, place in enumerate(self.places) if place.cache == name)

    def kept_of(self, name: str) -> tuple[int, ...]:
        """A cache's layers as the arena numbers them, in its own order; none where the arena does not keep them."""
        numbers = (self.kept[layer] for layer in self.layers_of(name))
        return tuple(number for number in numbers if number is not None)
