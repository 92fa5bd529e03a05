"""Measures constrained answers: validity, cost of masks, speed with and without."""
