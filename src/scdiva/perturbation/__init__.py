"""Perturbations: a screen, what it predicts of other conditions, and predicted cells. `scdiva.tl` has the calls."""
