"""Cell type annotation: fitting an annotator to labelled cells, and predicting labels with it."""
