"""The files of what is saved, a model or what is fitted beside one: named, summed, and put in place at once."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from scdiva._checks import refuse_unwritable
from scdiva._version import __version__

FORMAT, FORMAT_VERSION = "scdiva", 1
CONFIG, WEIGHTS, VOCABULARY = "config.json", "model.safetensors", "vocabulary.safetensors"
CARD, CHECKSUMS = "README.md", "SHA256SUMS"
MODEL = "model"
"""Folder of the model in that of what is fitted."""
DTYPES = ("float32", "float16", "bfloat16")
"""In which weights may be stored."""
SUMMED = (CARD, CONFIG, WEIGHTS, VOCABULARY)
LONGEST_SUMS = 4096
"""Characters that are read of the file of sums, which has four lines."""
_HOLDS = {
    "annotator": "an annotator: scdiva.tl.annotate(adata, model=folder) takes it",
    "perturbation_model": "a fitted perturbation model: scdiva.tl.predict_perturbation(adata, model=folder) takes it",
    "model": "a model: scdiva.tl.embed(adata, model=folder) takes it",
    "run": "a run of scdiva pretrain",
}


def kind_of(folder: Path) -> str | None:
    """Say what a folder looks like, by the names of its files: a model, what is fitted, a run of training, or None."""
    for kind in ("annotator", "perturbation_model"):
        if any((folder / f"{kind}.{ending}").is_file() for ending in ("json", "safetensors")):
            return kind
    for kind, at in (("model", folder), ("run", folder / MODEL)):
        if (at / CONFIG).is_file() and (at / CHECKSUMS).is_file():
            return kind
    return None


def in_words(kind: str) -> str:
    """Give a kind as it is written in a message."""
    return kind.replace("_", " ")


def write_sums(folder: Path, names: Iterable[str]) -> None:
    """Write SHA256SUMS of these files of a folder, as `sha256sum -c` reads it."""
    lines = [f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
    (folder / CHECKSUMS).write_text("".join(lines), encoding="utf-8")


def read_sums(folder: Path, names: Sequence[str] = SUMMED, kind: str = "model") -> dict[str, str]:
    """Read SHA256SUMS of what was saved, `"model"` or what is fitted: exactly these files, each once.

    Raises
    ------
    FileNotFoundError
        If one of them is missing.
    ValueError
        If others are listed, or the folder holds something of another kind.
    """
    if (found := kind_of(folder)) not in (None, kind):
        inner = f". The model in it is {str(folder / MODEL)!r}" if kind == "model" else ""
        raise ValueError(f"{str(folder)!r} is no {in_words(kind)}, it holds {_HOLDS[str(found)]}{inner}.")
    for name in (*names, CHECKSUMS):
        if not (folder / name).is_file():
            mend = "under these names"
            if (folder / VOCABULARY).with_suffix(".parquet").is_file():
                whole = folder.parent if (folder.parent / CHECKSUMS).is_file() else folder
                mend = f"earlier versions kept the last as parquet: python scripts/convert_vocabulary.py {str(whole)!r}"
            raise FileNotFoundError(
                f"{folder} lacks {name}: the folder of a saved {in_words(kind)} holds {CHECKSUMS}, "
                f"{', '.join(names)}; {mend}"
            )
    with (folder / CHECKSUMS).open(encoding="utf-8", errors="replace") as file:
        text = file.read(LONGEST_SUMS)
    pairs = [line.split("  ", 1) for line in text.splitlines()]
    sums = {pair[-1]: pair[0] for pair in pairs}
    if sorted(sums) != sorted(names) or len(pairs) != len(names):
        raise ValueError(f"{folder / CHECKSUMS} must list {', '.join(names)}, each once, and nothing else")
    return sums


def read_checked(folder: Path, name: str, sums: dict[str, str]) -> bytes:
    """Read a file whole and hold it against its checksum."""
    data = (folder / name).read_bytes()
    if hashlib.sha256(data).hexdigest() != sums[name]:
        raise ValueError(
            f"{folder / name} does not match {CHECKSUMS}: it is damaged, cut short, swapped or was edited; "
            "fetch the folder again, or save it again"
        )
    return data


def read_json(file: Path, data: bytes, kind: str = FORMAT) -> dict[str, Any]:
    """Read what describes a model, or what is fitted; format and version are looked at before anything else in it."""
    try:
        found = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # numbers of 5,000 digits and lists a thousand deep too
        raise ValueError(f"{file} is no JSON: {error!s:.300}") from error
    if not isinstance(found, dict) or found.get("format") != kind:
        raise ValueError(f"{file} has no entry format = {kind!r}: it does not describe what was saved as that")
    if found.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{file} has format version {found.get('format_version')!r:.80} (written by scdiva "
            f"{found.get('scdiva_version')!s:.80}); scdiva {__version__} reads version {FORMAT_VERSION}: "
            "update scdiva, or ask for it in this format"
        )
    return found


def read_config(folder: Path, sums: dict[str, str]) -> dict[str, Any]:
    """Read config.json of a model."""
    config = read_json(folder / CONFIG, read_checked(folder, CONFIG, sums))
    keys = {"format", "format_version", "scdiva_version", "model", "n_parameters", "dtype", "vocabulary", "metadata"}
    if config.keys() != keys:
        raise ValueError(
            f"{folder / CONFIG} must hold {', '.join(sorted(keys))}, not {', '.join(sorted(config))[:300]}"
        )
    if wrong := [key for key in ("model", "vocabulary", "metadata") if not isinstance(config[key], dict)]:
        raise ValueError(f"{folder / CONFIG}: the entry {wrong[0]!r} must be an object, not {config[wrong[0]]!r:.80}")
    return config


@contextlib.contextmanager
def written_beside(folder: Path, overwrite: bool, kind: str) -> Iterator[Path]:
    """Give a new folder beside `folder`, and put it in its place when the block ends well; else leave no trace.

    Parameters
    ----------
    folder
        Where what is saved will stand.
    overwrite
        Whether one of its kind that stands there is replaced.
    kind
        What is saved, as :func:`kind_of` names it.

    Raises
    ------
    FileExistsError
        If something stands there that is not to be replaced, or is of another kind.
    """
    ours = kind_of(folder) == kind
    if folder.exists() and not (overwrite and ours):
        hint = "pass overwrite=True" if ours else f"it is no {in_words(kind)} folder; choose another path"
        raise FileExistsError(f"{folder} exists already: {hint}")
    refuse_unwritable(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    mark = uuid.uuid4().hex[:8]
    part, old = (folder.parent / f".{folder.name}.{mark}.{state}" for state in ("part", "old"))
    part.mkdir()
    try:
        yield part
        if overwrite and folder.exists():
            folder.rename(old)
        part.rename(folder)
    except BaseException:
        if old.exists() and not folder.exists():
            old.rename(folder)
        shutil.rmtree(part, ignore_errors=True)
        raise
    if old.is_symlink():  # what it leads to is not ours
        old.unlink()
    else:
        shutil.rmtree(old, ignore_errors=True)
