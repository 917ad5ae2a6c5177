"""Embeddings of cells and genes: zero-shot, adapted to a dataset, of files, and their UMAP."""
