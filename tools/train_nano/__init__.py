"""Trains the bundled model `models/carrel-nano`: `python -m tools.train_nano --books DIR --out DIR`."""
