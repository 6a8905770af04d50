"""The map from a model's layers to caches: numbers within each cache, and within the arena."""

from gpu_worker.caches.layer_map import FULL, POLICY, LayerMap, Place

WINDOW = "window"


def test_each_cache_numbers_its_own_layers_from_zero() -> None:
    layers = LayerMap.of([WINDOW, POLICY, FULL, WINDOW, POLICY])
    assert layers.places == (
        Place(WINDOW, 0),
        Place(POLICY, 0),
        Place(FULL, 0),
        Place(WINDOW, 1),
        Place(POLICY, 1),
    )
    assert layers.names == (WINDOW, POLICY, FULL)
    assert layers.layers_of(WINDOW) == (0, 3)
    assert layers.layers_of("another") == ()


def test_the_arena_numbers_the_layers_that_it_keeps() -> None:
    layers = LayerMap.of([WINDOW, POLICY, WINDOW, FULL, POLICY], unkept=[WINDOW])
    assert layers.kept == (None, 0, None, 1, 2)
    assert (layers.num_layers, layers.num_kept, layers.keeps_all) == (5, 3, False)
    assert layers.kept_of(POLICY) == (0, 2)
    assert layers.kept_of(WINDOW) == ()


def test_the_first_layers_are_full_and_all_are_kept() -> None:
    assert LayerMap.with_full(3, 1) == LayerMap.of([FULL, POLICY, POLICY])
    assert LayerMap.with_full(3, 9) == LayerMap.of([FULL] * 3)
    assert LayerMap.with_full(3).names == (POLICY,)
    assert LayerMap.with_full(3, 1).keeps_all
