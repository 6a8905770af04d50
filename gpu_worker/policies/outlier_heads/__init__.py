"""Outlier heads keep every token."""
