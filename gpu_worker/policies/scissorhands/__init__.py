"""Scissorhands: tokens that stayed important."""
