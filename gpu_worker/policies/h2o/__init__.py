"""H2O: heavy hitters and recent tokens."""
