"""Measure training on every rank and show it."""
