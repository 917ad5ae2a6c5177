"""`python scripts/convert_vocabulary.py PATH`: vocabularies in parquet, as they were kept at first, become safetensors.

PATH is such a file, or the folder of a model or of what was fitted with one; sums in it are written anew. arrow takes
what a parquet file states of its size at its word, so convert only files whose source you trust.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

from scdiva.tokenizer.vocabulary import Vocabulary

OLD, NEW, SUMS = "vocabulary.parquet", "vocabulary.safetensors", "SHA256SUMS"


def convert(path: Path) -> None:
    """Write a vocabulary, or each of a folder, anew beside the old file, which stays unless it is a model's."""
    if not path.is_dir():
        _convert_file(path)
        return
    for old in sorted(path.rglob(OLD)):
        _convert_file(old)
        if (old.parent / SUMS).exists():
            old.unlink()
    for sums in sorted(path.rglob(SUMS), key=lambda one: -len(one.parts)):  # outer ones hold the sums of inner ones
        lines = sums.read_text("utf-8").splitlines()
        for i, line in enumerate(lines):
            name = line.split("  ", 1)[1]
            if name == OLD or name.endswith(SUMS):
                name = name.replace(OLD, NEW)
                lines[i] = f"{hashlib.sha256((sums.parent / name).read_bytes()).hexdigest()}  {name}"
        sums.write_text("\n".join([*lines, ""]), "utf-8")


def _convert_file(path: Path) -> None:
    import pyarrow.parquet as pq

    stored = pq.read_table(path)
    foreign = json.loads((stored.schema.metadata or {}).get(b"scdiva_foreign", b"[]"))
    Vocabulary(stored.to_pandas(ignore_metadata=True), foreign).write(path.with_suffix(".safetensors"))


if __name__ == "__main__":
    for given in sys.argv[1:]:
        convert(Path(given))
