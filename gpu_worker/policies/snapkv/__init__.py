"""SnapKV: what the last queries attend."""
