"""Calibration: texts become samples of token ids, and a process of the worker's package measures the model on them."""
