"""Formats in which checkpoints store quantised matrices, and how a checkpoint's are found."""
