"""Vocabulary files in safetensors, which can be read safely from untrusted sources.

Each column of names is UTF-8 text, a line a gene; `entropy` is float32 `(n_genes,)`; `foreign` has a line for each name
that matches nothing; `scdiva_vocabulary` is the version of the format.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from scdiva._checks import printable
from scdiva._files import output_path, put_whole

TEXTS = ("ensembl_id", "symbol", "previous", "alias", "biotype")
COLUMNS = (*TEXTS, "entropy")
"""Columns of a vocabulary table. All are strings but `entropy` (float32, nats)."""
MOST_BYTES = 2**28
"""Maximum size of a vocabulary file; the human one has 3 MB."""

_VERSION, _FOREIGN = "scdiva_vocabulary", "foreign"
_FORMAT = 2


def read_file(data: bytes, path: Path) -> tuple[pd.DataFrame, list[str]]:
    """Read a vocabulary's table and its foreign names from the bytes of a file.

    Parameters
    ----------
    data
        Content of the file.
    path
        The file, for messages.

    Raises
    ------
    ValueError
        If it is not a vocabulary, damaged or too large; the message names the file.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        held = load(data)
        texts = {name: array.tobytes().decode() for name, array in held.items() if array.dtype == np.uint8}
    except (SafetensorError, UnicodeDecodeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged or is no vocabulary: {printable(f'{error!s:.300}')}") from error
    wanted = sorted([*COLUMNS, _VERSION, _FOREIGN])
    if sorted(held) != wanted:
        raise ValueError(f"{path} is no vocabulary: it holds {sorted(held)!s:.300}, not {wanted}")
    if held[_VERSION].tolist() != [_FORMAT]:
        raise ValueError(f"{path} states version {held[_VERSION].tolist()!s:.40} of the format, not {_FORMAT}")
    entropy, foreign = held["entropy"], texts.pop(_FOREIGN, "")
    lines = {name: text.split("\n") for name, text in texts.items()}
    counts = {name: len(names) for name, names in lines.items()}
    fits = set(counts) == set(TEXTS) and entropy.dtype == np.float32 and entropy.ndim == 1
    if not fits or set(counts.values()) != {len(entropy)}:
        raise ValueError(
            f"{path} is damaged or is no vocabulary: entropy is {entropy.dtype} {entropy.shape}, and there are names "
            f"{counts}"
        )
    return pd.DataFrame({**lines, "entropy": entropy}), foreign.split("\n") if foreign else []


def write_file(table: pd.DataFrame, foreign: tuple[str, ...], path: Any) -> None:
    """Write a table and foreign names to a path or an open file; equal vocabularies give equal bytes."""
    from safetensors.numpy import save

    lines = {**{name: table[name] for name in TEXTS}, _FOREIGN: foreign}
    texts = {name: np.frombuffer("\n".join(names).encode(), dtype=np.uint8) for name, names in lines.items()}
    entropy = table["entropy"].to_numpy(dtype=np.float32)
    data = save({**texts, "entropy": entropy, _VERSION: np.array([_FORMAT], dtype=np.int64)})
    if hasattr(path, "write"):
        path.write(data)
    else:
        put_whole(output_path(path, "path"), lambda file: file.write(data))
