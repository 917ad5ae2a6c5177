"""Populations: what cells of a state express, fitted to the user's cells, and new cells drawn from it."""
