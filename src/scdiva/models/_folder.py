"""The files of what is saved, a model or what is fitted beside one: named, summed, and put in place at once."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from scdiva._checks import refuse_unwritable
from scdiva._files import MOST_TEXT, parse_json, printable, read_bytes, whole_or_not
from scdiva._version import __version__
from scdiva.tokenizer._vocabulary_file import MOST_BYTES

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
            raise FileNotFoundError(
                f"{folder} lacks {name}: the folder of a saved {in_words(kind)} holds {CHECKSUMS}, {', '.join(names)}."
            )
    with (folder / CHECKSUMS).open(encoding="utf-8", errors="replace") as file:
        text = file.read(LONGEST_SUMS)
    pairs = [line.split("  ", 1) for line in text.splitlines()]
    sums = {pair[-1]: pair[0] for pair in pairs}
    if sorted(sums) != sorted(names) or len(pairs) != len(names):
        raise ValueError(f"{folder / CHECKSUMS} must list {', '.join(names)}, each once, and nothing else")
    return sums


def _most_bytes(name: str) -> int:
    """Bytes of the largest file of this name that is read; weights have to fit into memory."""
    if name == VOCABULARY:
        return MOST_BYTES
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if name.endswith(".safetensors") else MOST_TEXT


def read_checked(folder: Path, name: str, sums: dict[str, str]) -> bytes:
    """Read a file whole and hold it against its checksum."""
    data = read_bytes(folder / name, _most_bytes(name))
    if hashlib.sha256(data).hexdigest() != sums[name]:
        raise ValueError(
            f"{folder / name} does not match {CHECKSUMS}: it is damaged, cut short, swapped or was edited; "
            "fetch the folder again, or save it again"
        )
    return data


def read_json(file: Path, data: bytes, kind: str = FORMAT) -> dict[str, Any]:
    """Read what describes a model, or what is fitted; format and version are looked at before anything else in it."""
    found = parse_json(file, data)
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
            f"{folder / CONFIG} must hold {', '.join(sorted(keys))}, not {printable(', '.join(sorted(config))[:300])}"
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
        If something stands there that is not to be replaced, is of another kind, or contains files that no save wrote.
    """
    ours = kind_of(folder) == kind
    if folder.exists() and not (overwrite and ours):
        hint = "pass overwrite=True" if ours else f"it is no {in_words(kind)} folder; choose another path"
        raise FileExistsError(f"{folder} exists already: {hint}")
    refuse_foreign(folder, kind)
    refuse_unwritable(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with whole_or_not(folder) as part:
        part.mkdir()
        yield part


def refuse_foreign(folder: Path, kind: str) -> None:
    """Refuse to replace a folder that contains files which no save wrote.

    Parameters
    ----------
    folder
        The folder of a saved `kind`. It may be missing, or a symbolic link, which is then replaced itself.
    kind
        As :func:`kind_of` names it.

    Raises
    ------
    FileExistsError
        If there are such files.
    """
    if folder.is_symlink() or not folder.is_dir():
        return
    ours = {*SUMMED, CHECKSUMS}
    if kind != "model":
        ours = {f"{MODEL}/{name}" for name in ours} | {f"{kind}.json", f"{kind}.safetensors", CHECKSUMS, MODEL}
    held = (path for path in folder.rglob("*") if path.name != ".DS_Store")
    if foreign := sorted(name for path in held if (name := path.relative_to(folder).as_posix()) not in ours):
        raise FileExistsError(
            f"{str(folder)!r} contains {len(foreign)} files or folders that scdiva did not write, the first is "
            f"{foreign[0]!r}: overwrite=True would delete them. Move them, or choose another path."
        )
