"""Reconstructed, imputed and generated expression, and the likelihood of cells."""
