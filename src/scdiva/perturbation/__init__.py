"""Perturbation screens: predicted responses, saved models, scores."""
