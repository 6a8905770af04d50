"""What one rank executes: model, slots, caches, graphs and transfers. It decides nothing: the engine does."""
