"""Files of published datasets: looked up in the data folder, or downloaded into it and verified."""

from __future__ import annotations

import csv
import hashlib
import os
import tempfile
from http.client import responses
from importlib import resources
from pathlib import Path

from scdiva._settings import progress_bar, settings
from scdiva._version import __version__

TABLE = resources.files("scdiva.datasets").joinpath("published.tsv")
"""Names, files, checksums and addresses."""
_HEADERS = {"User-Agent": f"scdiva/{__version__}", "Accept-Encoding": "identity"}
"""scverse's server answers 403 to the default name of Python's clients."""
_TIMEOUT = (10.0, 60.0)
"""Seconds until a connection is made, and seconds without a byte."""
_LARGE = 100_000_000
"""Bytes above which a file is downloaded only on request."""


def published_file(name: str, *, download: bool = False, instead: str = "") -> Path:
    """Return a file of a dataset in the data folder; download it if there is none.

    Parameters
    ----------
    name
        A name in `published.tsv`. Its files are looked up in the order of their rows: the complete dataset, and a
        smaller one that a data folder or a mirror may have instead.
    download
        Whether a first file of more than 100 MB may be downloaded. If so, a smaller one is not read instead.
    instead
        An alternative to a large file, as a sentence for the error.

    Returns
    -------
    The path of a verified file.

    Raises
    ------
    FileNotFoundError
        If no copy and no address is known, or the file is large and `download` is False.
    ConnectionError
        If the download fails.
    ValueError
        If the file is not the published one.
    OSError
        If the data folder can't be written.
    """
    with TABLE.open(encoding="utf-8") as lines:
        table = list(csv.DictReader(lines, delimiter="\t"))
    rows = [row for row in table if row["name"] == name]
    rows = rows[:1] if download else rows
    sums: dict[str, set[str]] = {row["file"]: set() for row in rows}
    for row in rows:
        sums[row["file"]] |= {row["sha256"]} - {""}
    folder = _folder()
    for file in map(folder.joinpath, sums):
        if file.is_file():
            _verify(file, sums[file.name])
            return file

    first, call = rows[0], f"sd.datasets.{name.removesuffix('_subset')}"
    file, address, n_bytes = folder / first["file"], first["address"], int(first["bytes"])
    mirror = (settings.data_url or os.environ.get("SCDIVA_DATA_URL", "")).rstrip("/")
    if not mirror and not address.endswith(".h5ad"):
        raise FileNotFoundError(
            f"{file} is not there, and no public address has it: it was made from {address}, which only R reads. "
            f'Convert that to h5ad and pass it, {call}(path="{name}.h5ad"), or set sd.settings.data_url to a mirror.'
        )
    if n_bytes > _LARGE and not download:
        raise FileNotFoundError(
            f"{file} is not there, and it is large: {call}(download=True) downloads {n_bytes / 1e9:.1f} GB from "
            f"{mirror or address}, once. {instead}{call}(path={file.name!r}) reads a copy."
        )
    names = list(sums) if mirror else [file.name]
    for one in names:
        try:
            return _download(f"{mirror}/{one}" if mirror else address, folder / one, sums[one], call)
        except FileNotFoundError:  # a mirror may have the smaller file only
            if one == names[-1]:
                raise
    raise AssertionError


def _folder() -> Path:
    """Return the folder in which datasets are kept."""
    import pooch

    return Path(settings.data_dir or os.environ.get("SCDIVA_DATA_DIR") or pooch.os_cache("scdiva")).expanduser()


def _verify(file: Path, sums: set[str]) -> None:
    """Raise an error if a file matches neither a published checksum nor the one recorded after its download."""
    recorded = file.with_name(f"{file.name}.sha256")
    if recorded.is_file():
        sums = sums | set(recorded.read_text(encoding="utf-8").split()[:1])
    if sums and _sha256(file) not in sums:
        raise ValueError(
            f"{file} is not the published file, or has changed since it was downloaded: its SHA-256 differs. Move it "
            "and call again, or pass path= to read it as it is."
        )


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _download(address: str, file: Path, sums: set[str], call: str) -> Path:
    """Download a file, verify it, and move it to its name; without a known checksum, record its own next to it."""
    import requests

    remedy = f"Try again, or download it another way and pass it, {call}(path={file.name!r})."
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".download-", dir=file.parent) as scratch:
            part = Path(scratch) / file.name
            with (
                requests.get(address, headers=_HEADERS, timeout=_TIMEOUT, stream=True) as answer,
                part.open("wb") as out,
            ):
                answer.raise_for_status()
                length = answer.headers.get("Content-Length", "")
                n_bytes = int(length) if length.isdecimal() else None
                with progress_bar(desc=f"downloading {file.name}", unit="B", total=n_bytes) as bar:
                    bar.unit_scale = True
                    for piece in answer.iter_content(2**16):
                        out.write(piece)
                        bar.update(len(piece))
                if n_bytes is not None and out.tell() != n_bytes:  # urllib3 before 2 does not notice
                    raise requests.exceptions.ChunkedEncodingError
            _check(part, address, sums, remedy)
            if not sums:
                record = part.with_name(f"{file.name}.sha256")
                record.write_text(f"{_sha256(part)}  {file.name}\n", encoding="utf-8")
                record.replace(file.with_name(record.name))
            part.replace(file)
    except requests.HTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        kind = FileNotFoundError if status == 404 else ConnectionError
        raise kind(f"{address} can't be downloaded: {status} {responses.get(status, '')}. {remedy}") from None
    except requests.RequestException as error:
        raise ConnectionError(f"{address} can't be downloaded: {_reason(error)}. {remedy}") from None
    except OSError as error:
        raise OSError(
            error.errno,
            f"{os.strerror(error.errno or 0)}: {file.parent} can't be written. Name another folder, "
            'sd.settings.data_dir = "data", or pass path= to read a copy of',
            file.name,
        ) from error
    return file


def _check(part: Path, address: str, sums: set[str], remedy: str) -> None:
    """Raise an error if a download is not a complete h5ad file or does not match the published checksum."""
    import h5py

    with part.open("rb") as content:
        begins = content.read(32)
    try:
        h5py.File(part, "r", locking=False).close()
    except OSError:
        what = "was cut off" if h5py.is_hdf5(part) else f"is no h5ad file, it begins with {ascii(begins)[2:-1]!r}"
        raise ValueError(f"The download from {address} {what}. {remedy}") from None
    if sums and (found := _sha256(part)) not in sums:
        raise ValueError(
            f"The download from {address} is not the published file: its SHA-256 is {found}, not "
            f"{' or '.join(sorted(sums))}. {remedy}"
        )


def _reason(error: Exception) -> str:
    """Reason of a failed download, for messages."""
    from requests import exceptions

    if isinstance(error, exceptions.Timeout) or "timed out" in str(error):
        return f"the server did not answer, or sent nothing for {_TIMEOUT[1]:g} seconds"
    if isinstance(error, exceptions.SSLError):
        return "the server's certificate is not accepted"
    if isinstance(error, exceptions.ProxyError):
        return "the proxy does not connect"
    if isinstance(error, exceptions.ChunkedEncodingError):
        return "the connection ended before the whole file was sent"
    if isinstance(error, exceptions.ConnectionError):
        return "no connection to the server"
    return f"the address or the answer is not valid ({type(error).__name__})"
