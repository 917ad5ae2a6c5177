"""Make a prepared corpus small enough to carry to another machine, and whole again there, without loss.

    python scripts/carry_corpus.py pack PREPARED CARRIED      # a folder of train_mini.py's part 1 -> a small folder
    python scripts/carry_corpus.py unpack CARRIED PREPARED    # and back; needs no anndata

Most of a packed corpus follows from the rest. The order of a cell's genes is their ranking, which can be repeated;
a cell's values are log(1 + 1e4 c / C), so small whole numbers c and one C say them all. Left are which genes a cell
has, written as gaps in the study's genes from the commonest to the rarest, and their counts; both are mostly small, and
LZMA does the rest. A value that this does not give to the bit is kept as it is; so is one that would depend on the last
bit of another machine's logarithm. `pack` decodes what it encoded and compares every bit; `unpack` checks sums.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import shutil
import zipfile
from pathlib import Path

import h5py
import numpy as np

from scdiva._constants import TARGET_SUM

FORMAT = 1
PARTS = ("train", "validation")
COLUMNS = ("indptr", "tokens", "values", "study")
DOUBT = 2.0**-48
"""Relative error allowed to a logarithm in float64: sixteen times the rounding."""


def value_of(counts: np.ndarray, total: np.ndarray | int) -> np.ndarray:
    """log(1 + 1e4 c / C) in float64, operation by operation as `to_token_space` does it."""
    return np.log1p(counts.astype(np.float64) / np.asarray(total, np.float64) * TARGET_SUM)


def recover_counts(values: np.ndarray) -> tuple[int, np.ndarray]:
    """Total C of a cell and whole counts c that give its values (float32, not empty); (0, empty) if there are none.

    The smallest value belongs to a count of 1, or of 2 ... 5 where the cell was cut; the total follows from the sum of
    all and is tried with its neighbours.
    """
    shares = np.expm1(values.astype(np.float64))
    for smallest in range(1, 6):
        counts = np.rint(shares / shares.min() * smallest)
        if counts.max() >= 2**31:
            break
        near = round(TARGET_SUM * counts.sum() / shares.sum())
        for total in (near + step for step in (0, -1, 1, -2, 2, -3, 3)):
            if total < 1:
                continue
            counts = np.rint(shares * (total / TARGET_SUM))
            if np.array_equal(value_of(counts, total).astype(np.float32), values):
                return int(total), counts.astype(np.int64)
    return 0, np.zeros(0, np.int64)


def as_bytes(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Numbers >= 0 as one byte each; those from 255 on are 255 there and stand in the second array."""
    return np.minimum(numbers, 255).astype(np.uint8), numbers[numbers >= 255].astype(np.uint32)


def from_bytes(small: np.ndarray, large: np.ndarray) -> np.ndarray:
    """Undo :func:`as_bytes`."""
    numbers = small.astype(np.int64)
    numbers[small == 255] = large
    return numbers


def ranking(tokens: np.ndarray, values: np.ndarray, rows: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """Positions of the genes of cells `rows[i]` to `rows[i + 1]`, each cell's in the order that `serialize` gives them.

    By float32 score, the greatest first, equal ones by token; values are positive. In numpy, since a machine that is
    lent need not have numba, which takes as long to compile as this takes.
    """
    score = values / denominator[tokens]
    key = (~score.view(np.uint32)).astype(np.uint64) << np.uint64(32) | tokens.astype(np.uint64)
    empty = [np.zeros(0, np.int64)]
    return np.concatenate(empty + [np.argsort(key[a:b]) + a for a, b in itertools.pairwise(rows.tolist())])


def checksum(content: dict[str, np.ndarray]) -> str:
    """SHA-256 over the columns of a packed corpus, with their types."""
    total = hashlib.sha256()
    for name in COLUMNS:
        total.update(f"{name} {content[name].dtype.str} {content[name].shape}".encode())
        total.update(np.ascontiguousarray(content[name]).tobytes())
    return total.hexdigest()


def read_packed(file: Path) -> tuple[dict[str, np.ndarray], dict]:
    """Everything of a packed corpus: its arrays, as a corpus of one file has them, and its header."""
    from scdiva.data.packed import PackedCells, token_type

    packed = PackedCells(file)
    indptr, tokens, values = packed.read(0, packed.n_obs)
    content = {
        "indptr": indptr,
        "tokens": tokens.astype(token_type(packed.n_tokens)),
        "values": values,
        "study": packed.study.astype(np.int32),
        "measured": np.array(packed.measured),
        "denominator": np.array(packed.denominator),
    }
    attributes = {name: getattr(packed, name) for name in ("fingerprint", "n_tokens", "max_length", "entropy_floor")}
    return content, {"attributes": {"scdiva_packed": 1, **attributes}, "study_names": packed.study_names}


def write_packed(file: Path, content: dict[str, np.ndarray], header: dict) -> None:
    """Write what :func:`read_packed` read."""
    with h5py.File(file, "w") as packed:
        packed.attrs.update(header["attributes"])
        for name in (*COLUMNS, "denominator"):
            packed[name] = content[name]
        packed["study_names"] = np.array(header["study_names"], dtype=h5py.string_dtype())
        packed.create_dataset("measured", data=content["measured"], compression="gzip")


def bounds_of_studies(study: np.ndarray) -> list[tuple[int, int]]:
    """First and last + 1 cell of each run of cells of one study."""
    edges = np.flatnonzero(np.diff(study)) + 1
    return list(zip([0, *edges.tolist()], [*edges.tolist(), len(study)], strict=True)) if len(study) else []


def encode(content: dict[str, np.ndarray], header: dict) -> dict[str, np.ndarray]:
    """The arrays that are carried, for :func:`decode`."""
    indptr, study, n_tokens = content["indptr"], content["study"], len(content["denominator"])
    gaps, counts, orders, totals, kept_cells = [], [], [], [], []
    at_exception, exceptions = [], []
    for first, last in bounds_of_studies(study):
        start, stop = int(indptr[first]), int(indptr[last])
        rows = indptr[first : last + 1] - start
        tokens, values = content["tokens"][start:stop].astype(np.int64), content["values"][start:stop]
        frequency = np.bincount(tokens, minlength=n_tokens)
        order = np.argsort(-frequency, kind="stable")[: np.count_nonzero(frequency)]
        place = np.empty(n_tokens, np.int64)
        place[order] = np.arange(len(order))
        orders.append(order)
        cell = np.repeat(np.arange(last - first), np.diff(rows))
        sort = np.lexsort((place[tokens], cell))
        places, values = place[tokens][sort], values[sort]
        gap = np.diff(places, prepend=-1) - 1
        heads = rows[:-1][np.diff(rows) > 0]
        gap[heads] = places[heads]
        gaps.append(gap)
        for a, b in itertools.pairwise(rows.tolist()):
            total, whole = recover_counts(values[a:b]) if b > a else (0, np.zeros(0, np.int64))
            totals.append(total)
            if not total:
                kept_cells.append(values[a:b])
                continue
            counts.append(whole - 1)
            exact = value_of(whole, total)
            unsure = (exact * (1 - DOUBT)).astype(np.float32) != (exact * (1 + DOUBT)).astype(np.float32)
            at_exception.append(np.flatnonzero(unsure) + start + a)
            exceptions.append(values[a:b][unsure])
    nothing, no_value = [np.zeros(0, np.int64)], [np.zeros(0, np.float32)]
    gap_bytes, gap_large = as_bytes(np.concatenate(nothing + gaps))
    count_bytes, count_large = as_bytes(np.concatenate(nothing + counts))
    said = {**header, "format": FORMAT, "sha256": checksum(content), "n_tokens": n_tokens}
    said["dtypes"] = {name: content[name].dtype.str for name in COLUMNS}
    return {
        "header": np.frombuffer(json.dumps(said).encode(), np.uint8),
        "lengths": np.diff(indptr).astype(np.int32),
        "study": study,
        "measured": np.packbits(content["measured"]),
        "denominator": content["denominator"],
        "order": np.concatenate(nothing + orders).astype(np.int32),
        "order_sizes": np.array([len(order) for order in orders], np.int64),
        "gaps": gap_bytes,
        "gaps_large": gap_large,
        "counts": count_bytes,
        "counts_large": count_large,
        "totals": np.array(totals, np.int64),
        "kept_cells": np.concatenate(no_value + kept_cells),
        "at_exception": np.concatenate(nothing + at_exception),
        "exceptions": np.concatenate(no_value + exceptions),
    }


def decode(carried: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict]:
    """Arrays and header of the packed corpus that :func:`encode` took.

    Raises
    ------
    ValueError
        If the result differs from what was packed in a single bit.
    """
    header = json.loads(carried["header"].tobytes())
    if header["format"] != FORMAT:
        raise ValueError(f"The carried corpus has format {header['format']}, this script reads {FORMAT}; pack it anew.")
    lengths, study, denominator = carried["lengths"].astype(np.int64), carried["study"], carried["denominator"]
    n_tokens, indptr = header["n_tokens"], np.concatenate([[0], np.cumsum(lengths)])
    gaps = from_bytes(carried["gaps"], carried["gaps_large"])
    counts = from_bytes(carried["counts"], carried["counts_large"]) + 1
    total = np.repeat(carried["totals"], lengths)
    values = np.empty(len(gaps), np.float32)
    values[total > 0] = value_of(counts, total[total > 0]).astype(np.float32)
    values[total == 0] = carried["kept_cells"]
    values[carried["at_exception"]] = carried["exceptions"]
    steps = np.cumsum(gaps + 1)  # within a cell, places are the sums of its gaps, from -1 on
    before = np.concatenate([[0], steps])[indptr[:-1]]
    places = steps - np.repeat(before, lengths) - 1
    tokens = np.empty(len(gaps), np.int32)
    order_start = 0
    for number, (first, last) in enumerate(bounds_of_studies(study)):
        size = int(carried["order_sizes"][number])
        order = carried["order"][order_start : order_start + size]
        order_start += size
        start, stop = int(indptr[first]), int(indptr[last])
        rows = indptr[first : last + 1] - start
        genes, found = order[places[start:stop]], values[start:stop]
        rank = ranking(genes, found, rows, denominator)
        tokens[start:stop], values[start:stop] = genes[rank], found[rank]
    n_studies = len(header["study_names"])
    content = {
        "indptr": indptr,
        "tokens": tokens,
        "values": values,
        "study": study,
        "measured": np.unpackbits(carried["measured"], count=n_studies * n_tokens).astype(bool).reshape(-1, n_tokens),
        "denominator": denominator,
    }
    for name in COLUMNS:
        content[name] = content[name].astype(header["dtypes"][name], copy=False)
    if checksum(content) != header["sha256"]:
        raise ValueError("The corpus came out different from what was packed; carry it again, or pack it anew.")
    return content, {key: header[key] for key in ("attributes", "study_names")}


def write_carried(file: Path, carried: dict[str, np.ndarray]) -> None:
    """Write arrays as an .npz with LZMA inside, which `numpy.load` reads."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_LZMA) as archive:
        for name, array in carried.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def every_nth(content: dict[str, np.ndarray], share: float) -> dict[str, np.ndarray]:
    """Cells taken evenly from each study, at least one of each."""
    lengths = np.diff(content["indptr"])
    chosen = []
    for first, last in bounds_of_studies(content["study"]):
        n = max(1, int((last - first) * share))
        chosen.append(first + np.arange(n) * (last - first) // n)
    rows = np.concatenate(chosen)
    indptr = np.concatenate([[0], np.cumsum(lengths[rows])])
    at = np.arange(indptr[-1]) + np.repeat(content["indptr"][:-1][rows] - indptr[:-1], lengths[rows])
    cut = {"indptr": indptr, "tokens": content["tokens"][at], "values": content["values"][at]}
    return {**content, **cut, "study": content["study"][rows]}


def pack(prepared: Path, out: Path, share: float = 1.0) -> int:
    """Write OUT/{train,validation}.npz, the vocabulary and what was left out; return the bytes of the folder."""
    out.mkdir(parents=True, exist_ok=True)
    said = {}
    for part in PARTS:
        content, header = read_packed(prepared / f"{part}.h5")
        n_cells = len(content["study"])
        if share < 1 and part == "train":
            content = every_nth(content, share)
        carried = encode(content, header)
        again, again_header = decode(carried)
        same = all(again[name].tobytes() == content[name].tobytes() for name in content)
        if not same or again_header != header:
            raise ValueError(f"{prepared / part}.h5 does not come back bit for bit; this is a mistake in the script.")
        write_carried(out / f"{part}.npz", carried)
        said[part] = {"cells_packed": len(content["study"]), "cells_of": n_cells}
    (out / "carried.json").write_text(json.dumps({**said, "share": share}, indent=1) + "\n")
    shutil.copy(prepared / "vocabulary.safetensors", out / "vocabulary.safetensors")  # last: the folder is complete
    return sum(file.stat().st_size for file in out.iterdir())


def unpack(carried: Path, prepared: Path) -> None:
    """Write the prepared folder again."""
    prepared.mkdir(parents=True, exist_ok=True)
    for part in PARTS:
        with np.load(carried / f"{part}.npz") as saved:
            content, header = decode(dict(saved))
        write_packed(prepared / f"{part}.h5", content, header)
    shutil.copy(carried / "carried.json", prepared / "carried.json")
    shutil.copy(carried / "vocabulary.safetensors", prepared / "vocabulary.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("pack", "unpack"))
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--share", type=float, default=1.0, help="pack this share of each training study's cells")
    arguments = parser.parse_args()
    if not 0 < arguments.share <= 1:
        raise SystemExit(f"--share must be above 0 and at most 1, got {arguments.share}.")
    if arguments.action == "pack":
        print(f"{arguments.target}: {pack(arguments.source, arguments.target, arguments.share) / 2**20:.1f} MiB")
    else:
        unpack(arguments.source, arguments.target)
        print(f"{arguments.target}: every bit as it was packed")


if __name__ == "__main__":
    main()
