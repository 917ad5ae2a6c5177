"""Make a prepared corpus small enough to carry to another machine, and unpack it there.

    python scripts/carry_corpus.py pack PREPARED CARRIED      # a folder of train_mini.py's part 1 -> a small folder
    python scripts/carry_corpus.py unpack CARRIED PREPARED    # and back; needs no anndata

A packed cell has ranked genes and values log(1 + 1e4 c / C). The archive holds the gaps between its sorted genes and
the counts c, mostly one byte each, and C; values without such counts are stored as they are. `unpack` computes values
and ranks again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import zipfile
from pathlib import Path

import h5py
import numpy as np

from scdiva._constants import TARGET_SUM
from scdiva.data.packed import PackedCells, token_type

PARTS = ("train", "validation")
Arrays = dict[str, np.ndarray]


def values_of(counts: np.ndarray, total: np.ndarray | int) -> np.ndarray:
    """float32 log(1 + 1e4 c / C)."""
    return np.log1p(counts.astype(np.float64) / np.asarray(total, np.float64) * TARGET_SUM).astype(np.float32)


def recover_counts(values: np.ndarray) -> tuple[int, np.ndarray]:
    """Recover the total C and the integer counts c of a cell from its values; (0, empty) if no counts give them.

    The smallest value belongs to a count of 1, or of 2 to 5 where the cell was cut; the total follows from the sum of
    all and is tried with its neighbours.
    """
    shares = np.expm1(values.astype(np.float64))
    for smallest in range(1, 6):
        counts = np.rint(shares / shares.min(initial=np.inf) * smallest)
        if not len(values) or counts.max() >= 2**31:
            break
        near = round(TARGET_SUM * counts.sum() / shares.sum())
        for total in (near + step for step in (0, -1, 1, -2, 2, -3, 3) if near + step > 0):
            counts = np.rint(shares * (total / TARGET_SUM))
            if np.array_equal(values_of(counts, total), values):
                return int(total), counts.astype(np.int64)
    return 0, np.zeros(0, np.int64)


def read_packed(file: Path) -> tuple[Arrays, dict]:
    """The arrays of a packed corpus, and its header."""
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


def write_packed(file: Path, content: Arrays, header: dict) -> None:
    """Write what :func:`read_packed` read as a corpus of one file."""
    with h5py.File(file, "w") as packed:
        packed.attrs.update(header["attributes"])
        for name in ("indptr", "tokens", "values", "study", "denominator"):
            packed[name] = content[name]
        packed["study_names"] = np.array(header["study_names"], dtype=h5py.string_dtype())
        packed.create_dataset("measured", data=content["measured"], compression="gzip")


def encode(content: Arrays, header: dict) -> Arrays:
    """The arrays that are carried, for :func:`decode`."""
    indptr, gaps, counts, totals, raw_values = content["indptr"], [], [], [], []
    for a, b in itertools.pairwise(indptr.tolist()):
        order = np.argsort(content["tokens"][a:b])
        values = content["values"][a:b][order]
        gaps.append(np.diff(content["tokens"][a:b][order].astype(np.int64), prepend=0))
        total, cell_counts = recover_counts(values)
        totals.append(total)
        (counts if total else raw_values).append(cell_counts if total else values)
    carried = {
        "header": np.frombuffer(json.dumps(header).encode(), np.uint8),
        "totals": np.array(totals, np.int64),
        "kept": np.concatenate([np.zeros(0, np.float32), *raw_values]),
        **{name: content[name] for name in ("indptr", "study", "measured", "denominator")},
    }
    for name, parts in (("gaps", gaps), ("counts", counts)):  # a byte each; 255 stands for the next of the large ones
        numbers = np.concatenate([np.zeros(0, np.int64), *parts])
        carried[name] = np.minimum(numbers, 255).astype(np.uint8)
        carried[f"large_{name}"] = numbers[numbers >= 255].astype(np.uint32)
    return carried


def decode(carried: Arrays) -> tuple[Arrays, dict]:
    """Arrays and header of the packed corpus that :func:`encode` took."""
    numbers = {}
    for name in ("gaps", "counts"):
        numbers[name] = carried[name].astype(np.int64)
        numbers[name][carried[name] == 255] = carried[f"large_{name}"]
    indptr, header = carried["indptr"], json.loads(carried["header"].tobytes())
    total = np.repeat(carried["totals"], np.diff(indptr))
    values = np.empty(len(total), np.float32)
    values[total > 0], values[total == 0] = values_of(numbers["counts"], total[total > 0]), carried["kept"]
    tokens = np.empty(len(total), token_type(header["attributes"]["n_tokens"]))
    for a, b in itertools.pairwise(indptr.tolist()):
        token = np.cumsum(numbers["gaps"][a:b])
        order = np.lexsort((token, -(values[a:b] / carried["denominator"][token])))  # the ranking of `serialize`
        tokens[a:b], values[a:b] = token[order], values[a:b][order]
    rest = {name: carried[name] for name in ("indptr", "study", "measured", "denominator")}
    return {**rest, "tokens": tokens, "values": values}, header


def pack(prepared: Path, out: Path) -> int:
    """Write OUT/{train,validation}.npz and the vocabulary; return the bytes of the folder."""
    out.mkdir(parents=True, exist_ok=True)
    for part in PARTS:
        carried = encode(*read_packed(prepared / f"{part}.h5"))
        with zipfile.ZipFile(out / f"{part}.npz", "w", zipfile.ZIP_LZMA) as archive:  # numpy.load reads it
            for name, array in carried.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)
    shutil.copy(prepared / "vocabulary.safetensors", out / "vocabulary.safetensors")  # last: the folder is complete
    return sum(file.stat().st_size for file in out.iterdir())


def unpack(carried: Path, prepared: Path) -> None:
    """Write the prepared folder again."""
    prepared.mkdir(parents=True, exist_ok=True)
    for part in PARTS:
        with np.load(carried / f"{part}.npz") as saved:
            write_packed(prepared / f"{part}.h5", *decode(dict(saved)))
    shutil.copy(carried / "vocabulary.safetensors", prepared / "vocabulary.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("pack", "unpack"))
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    arguments = parser.parse_args()
    if arguments.action == "pack":
        print(f"{arguments.target}: {pack(arguments.source, arguments.target) / 2**20:.1f} MiB")
    else:
        unpack(arguments.source, arguments.target)


if __name__ == "__main__":
    main()
