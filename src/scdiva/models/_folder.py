"""The files of a model folder: named, checked against their sums, and put in place all at once."""

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

FORMAT = "scdiva"
FORMAT_VERSION = 1
CONFIG, WEIGHTS, VOCABULARY, CARD, CHECKSUMS = (
    "config.json",
    "model.safetensors",
    "vocabulary.safetensors",
    "README.md",
    "SHA256SUMS",
)
DTYPES = ("float32", "float16", "bfloat16")
"""In which weights may be stored."""
SUMMED = (CARD, CONFIG, WEIGHTS, VOCABULARY)
LONGEST_SUMS = 4096
"""Characters that are read of the file of sums, which has four lines."""


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def is_model_folder(folder: Path) -> bool:
    """Whether a folder looks like a model's; what it holds is not read."""
    return (folder / CONFIG).is_file() and (folder / CHECKSUMS).is_file()


def refuse_other_kind(folder: Path, wanted: str) -> None:
    """Refuse a folder that a call wrote which keeps something else in it, and say which call takes that.

    Parameters
    ----------
    folder
        The folder.
    wanted
        What it has to hold: `"model"`, `"annotator"` or `"perturbation_model"`.

    Raises
    ------
    ValueError
        If it holds another of these, or a run of training.
    """
    if (folder / f"{wanted}.json").is_file() or (wanted == "model" and is_model_folder(folder)):
        return
    model = folder / "model"
    if (folder / "annotator.json").is_file():
        holds = "an annotator: scdiva.tl.annotate(adata, model=folder) takes it, scdiva.models.load loads it"
    elif (folder / "perturbation_model.json").is_file():
        holds = (
            "a fitted perturbation model: scdiva.tl.predict_perturbation(adata, model=folder) takes it, "
            "scdiva.models.load loads it"
        )
    elif is_model_folder(folder):
        holds = "a model: scdiva.tl.embed(adata, model=folder) takes it, scdiva.models.load_model loads it"
    elif wanted == "model" and is_model_folder(model):
        holds = "a run of scdiva pretrain"
    else:
        return
    inner = f". The model in it is {str(model)!r}" if wanted == "model" and is_model_folder(model) else ""
    raise ValueError(f"{str(folder)!r} is no {wanted.replace('_', ' ')}, it holds {holds}{inner}.")


def write_sums(folder: Path, names: Iterable[str]) -> None:
    """Write SHA256SUMS of these files of a folder, as `sha256sum -c` reads it."""
    lines = [f"{sha256((folder / name).read_bytes())}  {name}\n" for name in names]
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
    refuse_other_kind(folder, kind)
    for name in (*names, CHECKSUMS):
        if not (folder / name).is_file():
            mend = "under these names"
            if (folder / VOCABULARY).with_suffix(".parquet").is_file():
                whole = folder.parent if (folder.parent / CHECKSUMS).is_file() else folder
                mend = f"earlier versions kept the last as parquet: python scripts/convert_vocabulary.py {str(whole)!r}"
            raise FileNotFoundError(
                f"{folder} lacks {name}: the folder of a saved {kind.replace('_', ' ')} holds {CHECKSUMS}, "
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
    if sha256(data) != sums[name]:
        raise ValueError(
            f"{folder / name} does not match {CHECKSUMS}: it is damaged, cut short, swapped or was edited; "
            "fetch the folder again, or save it again"
        )
    return data


def read_config(folder: Path, sums: dict[str, str]) -> dict[str, Any]:
    """Read config.json; format and version are looked at before anything else in it."""
    data = read_checked(folder, CONFIG, sums)
    try:
        config = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # numbers of 5,000 digits and lists a thousand deep too
        raise ValueError(f"{folder / CONFIG} is no JSON: {error!s:.300}") from error
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise ValueError(f"{folder / CONFIG} has no entry format = {FORMAT!r}: it does not describe a model of scdiva")
    if config.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{folder / CONFIG} has format version {config.get('format_version')!r:.80} (written by scdiva "
            f"{config.get('scdiva_version')!s:.80}); scdiva {__version__} reads version {FORMAT_VERSION}: "
            "update scdiva, or ask for the model in this format"
        )
    keys = {"format", "format_version", "scdiva_version", "model", "n_parameters", "dtype", "vocabulary", "metadata"}
    if config.keys() != keys:
        raise ValueError(
            f"{folder / CONFIG} must hold {', '.join(sorted(keys))}, not {', '.join(sorted(config))[:300]}"
        )
    if wrong := [key for key in ("model", "vocabulary", "metadata") if not isinstance(config[key], dict)]:
        raise ValueError(f"{folder / CONFIG}: the entry {wrong[0]!r} must be an object, not {config[wrong[0]]!r:.80}")
    return config


@contextlib.contextmanager
def written_beside(folder: Path, overwrite: bool, kind: str, *, ours: bool) -> Iterator[Path]:
    """Give a new folder beside `folder`, and put it in its place when the block ends well; else leave no trace.

    Parameters
    ----------
    folder
        Where what is saved will stand.
    overwrite
        Whether one that stands there is replaced.
    kind
        What is saved, in words.
    ours
        Whether what stands there, if anything, is of that kind.

    Raises
    ------
    FileExistsError
        If something stands there that is not to be replaced, or is of another kind.
    """
    if folder.exists() and not (overwrite and ours):
        hint = "pass overwrite=True" if ours else f"it is no {kind}; choose another path"
        raise FileExistsError(f"{folder} exists already: {hint}")
    refuse_unwritable(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    mark = uuid.uuid4().hex[:8]
    part, old = (folder.parent / f".{folder.name}.{mark}.{kind}" for kind in ("part", "old"))
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
