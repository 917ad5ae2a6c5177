"""Perturbations: a screen read, what it says of other conditions, and cells made of that. `scdiva.tl` has the calls."""
