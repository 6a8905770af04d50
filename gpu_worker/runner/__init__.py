"""The executing part of one rank: model, slots, caches, graphs and transfers. All decisions are the engine's."""
