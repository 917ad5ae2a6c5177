"""Batch integration, and expression corrected for it."""
