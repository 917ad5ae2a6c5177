"""Files: URLs, size limits for files from untrusted sources, output paths, atomic writes."""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import html
import json
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard, cast

from scdiva._checks import from_extra, printable
from scdiva._settings import logger

MOST_TEXT = 1 << 24
"""Maximum size of a text file (configuration, model card) in bytes."""
MOST_INDEX = 1 << 26
"""Maximum size of an index in bytes: a packed corpus of 150,000 parts, or the metadata of a zarr."""
MOST_VALUES, MOST_DEPTH = 2_000_000, 64
"""Maximum number of values in a JSON or YAML file, and maximum nesting depth."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a full disk."""
_STALE = 60.0
"""Age in seconds above which an unlocked temporary file is deleted."""


# --- reading ----------------------------------------------------------------------------------------------------------
def html_table(title: str, properties: Mapping[str, object]) -> str:
    """HTML table of an object's properties, for `_repr_html_`; None is omitted."""
    rows = (
        f'<tr><th style="text-align:left">{html.escape(name)}</th>'
        f'<td style="text-align:left">{html.escape(printable(f"{value!s:.500}"))}</td></tr>'
        for name, value in properties.items()
        if value is not None
    )
    return f"<table><caption><b>{html.escape(title)}</b></caption>{''.join(rows)}</table>"


def check_regular(path: str | os.PathLike[str], limit: int | None = None) -> int:
    """Size of a regular file in bytes; links are followed.

    Raises
    ------
    ValueError
        If it is a device, FIFO (reading it may wait forever) or socket, or larger than `limit` bytes.
    """
    status = os.stat(path)
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{str(path)!r} is not a regular file. Copy its content to a file.")
    if limit is not None and status.st_size > limit:
        raise ValueError(
            f"{str(path)!r} has {status.st_size:,} bytes; the maximum is {limit:,}. It is damaged or is not a file of "
            "this kind. Fetch or write it again."
        )
    return status.st_size


def read_bytes(path: str | os.PathLike[str], limit: int = MOST_TEXT) -> bytes:
    """Read a regular file of at most `limit` bytes; errors as in :func:`check_regular`, or MemoryError."""
    n_bytes = check_regular(path, limit)
    with open(path, "rb") as file:
        return file.read(n_bytes)


def parse_json(path: str | os.PathLike[str], data: bytes) -> Any:
    """Parse the content of a JSON file; `path` is for messages.

    Raises
    ------
    ValueError
        If it is not JSON, has too many values or is nested too deeply.
    """
    if sum(map(data.count, (b"[", b"{", b","))) > MOST_VALUES:
        raise ValueError(f"{path} has more than {MOST_VALUES:,} values of JSON, the maximum.")
    try:
        content = json.loads(data.decode("utf-8"))
    except (
        ValueError,
        RecursionError,
        MemoryError,
    ) as error:  # also for numbers of 5,000 digits and deeply nested lists
        raise ValueError(f"{path} is not JSON: {error!s:.300}") from error
    level, depth = [content], 0
    while level:
        if (depth := depth + 1) > MOST_DEPTH:
            raise ValueError(f"{path} has more than {MOST_DEPTH} nested levels of JSON, the maximum.")
        nested = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        level = [part for one in nested for part in one]
    return content


def parse_yaml(path: str | os.PathLike[str], data: bytes, loader: Any = None) -> Any:
    """Parse the content of a YAML file as :func:`parse_json` does; aliases, which may expand without limit, raise."""
    import yaml

    depth = 0
    try:
        text = data.decode("utf-8")
        for number, event in enumerate(yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))):
            if isinstance(event, yaml.AliasEvent):
                raise ValueError(f"it has an alias, *{event.anchor}. Write its value out")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MOST_DEPTH or number > MOST_VALUES:
                raise ValueError(f"it has more than {MOST_VALUES:,} values or is nested more than {MOST_DEPTH} deep")
        return yaml.load(text, Loader=loader or yaml.SafeLoader)
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path} can't be read as YAML: {' '.join(str(error).split())}.") from error


# --- writing ----------------------------------------------------------------------------------------------------------
def output_path(path: str | os.PathLike[str], name: str = "out") -> Path:
    """Return the local path of an output; raise ValueError if it is empty or a URL. `name` is the argument."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{name} must be a path, got {type(path).__name__}.")
    if not os.fspath(path):
        raise ValueError(f"{name}='' is not a path: pass that of a file or folder.")
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(path)):  # a Path merges the two slashes of a URL
        raise ValueError(
            f"{name}={str(path)!r} is a URL, and results are written to a local path: pass one, and copy the finished "
            "result to the URL."
        )
    return Path(path).expanduser()


@contextlib.contextmanager
def naming_output(out: Path) -> Iterator[None]:
    """Name the output and the remedy in errors of a full disk."""
    try:
        yield
    except OSError as error:
        # temporary files of this module are hidden; the name of any other file is kept
        below = "" if error.filename is None else os.path.relpath(os.fspath(error.filename), out.parent)
        if error.errno not in FULL or (below and not re.search(r"(^|/)\.[^./]", below)):
            raise
        folder = next(one for one in out.absolute().parents if one.exists())
        raise OSError(
            error.errno,
            f"{os.strerror(error.errno)}: {folder} has {_mib(shutil.disk_usage(folder).free)} free. Make room, or pass "
            "a path on another disk",
            str(out),
        ) from error


def refuse_full(out: Path, n_bytes: int) -> None:
    """Raise OSError if the disk of an output has less than `n_bytes` free."""
    if (free := shutil.disk_usage(out.parent).free) < n_bytes:
        raise OSError(
            errno.ENOSPC,
            f"{os.strerror(errno.ENOSPC)}: it takes {_mib(n_bytes)} and {out.parent} has {_mib(free)} free. Make room, "
            "or pass a path on another disk",
            str(out),
        )


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:,.1f} MiB"


@contextlib.contextmanager
def whole_or_not(out: Path) -> Iterator[Path]:
    """Write a file or folder atomically: yields a temporary path, and renames it to `out` if the block succeeds.

    The temporary path depends on `out` only, so that the next call deletes what a killed one left.

    Raises
    ------
    RuntimeError
        If another call is writing the same output.
    OSError
        If the disk is full, among others; the message names `out`.
    """
    new, old = beside(out, "new"), beside(out, "old")
    mark = out.with_name(f".{out.name}.writing")
    with naming_output(out), open_alone(mark):
        try:
            delete(new)
            yield new
            if not new.is_dir():
                with new.open("rb") as file:
                    os.fsync(file.fileno())
            elif os.path.lexists(out):  # folders can't be swapped in one step
                delete(old)
                out.rename(old)
            new.replace(out)
        finally:
            _settle(out)


def _settle(out: Path) -> None:
    """Delete temporary files of a locked output; restore its former content if it has none."""
    new, old = beside(out, "new"), beside(out, "old")
    with contextlib.suppress(OSError):
        delete(new)
    if os.path.lexists(old) and not os.path.lexists(out):
        old.rename(out)
    delete(old)
    out.with_name(f".{out.name}.writing").unlink(missing_ok=True)


def tidy(out: Path) -> None:
    """Delete temporary files that a killed call of :func:`whole_or_not` left."""
    with open_alone(out.with_name(f".{out.name}.writing")):
        _settle(out)


def beside(out: Path, state: str) -> Path:
    """Hidden path next to an output, for its ``"new"`` or ``"old"`` content while it is replaced."""
    return out.with_name(f".{out.stem}.{state}{out.suffix}")


def put_whole(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Write a file atomically; several processes may write the same one.

    Temporary files of killed processes are deleted. `write` is called with the open file. Errors of a full disk name
    `path`.
    """
    for left in path.parent.glob(f".{'[0-9a-f]' * 32}.{glob.escape(path.name)}"):
        _delete_stale(left)
    new = path.with_name(f".{uuid.uuid4().hex}.{path.name}")
    try:
        with naming_output(path), new.open("wb") as file:
            _lock(file)
            write(file)
            file.flush()
            os.fsync(file.fileno())
            new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def _lock(file: BinaryIO) -> bool:
    """Lock an open file; False if another process has it locked."""
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # some network file systems have no locks
        pass
    return True


def _delete_stale(path: Path) -> None:
    """Delete a temporary file of a process that has ended."""
    with contextlib.suppress(OSError):
        if time.time() - path.stat().st_mtime > _STALE:
            with path.open("rb") as file:
                if _lock(file):
                    path.unlink(missing_ok=True)


def open_alone(path: Path, *, waits: bool = False) -> BinaryIO:
    """Open a file for appending, with an exclusive lock that ends with the process.

    Parameters
    ----------
    path
        The file; created if it does not exist.
    waits
        Whether to wait for a lock of another call.

    Raises
    ------
    RuntimeError
        If another call has locked it, and `waits` is False.
    """
    import fcntl

    while True:
        file = path.open("a+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError:
            file.close()
            raise RuntimeError(
                f"{str(path)!r} is in use: another call is writing the same result. Wait for it, or pass another out."
            ) from None
        except OSError as error:  # some network file systems have no locks
            logger.warning("%s can't be locked (%s): simultaneous calls are not detected", path, error)
        # the previous owner may have deleted it before the lock was taken
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
        file.close()


def delete(path: Path) -> None:
    """Delete a file, a link, or a folder with its content, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# --- URLs -------------------------------------------------------------------------------------------------------------
_VERSIONS = ("ETag", "etag", "generation", "Last-Modified", "LastModified", "mtime", "created")
"""Fields that contain the version of a stored object, by file system. The first one that exists is used."""


def is_path(source: Any) -> TypeGuard[str | Path]:
    """Whether `source` is a path, a URL or cells of a SOMA experiment, and not an AnnData object."""
    return isinstance(source, str | PathLike) or hasattr(source, "stem")


def as_path(source: Any) -> Path:
    """Convert a path or URL; cells of a SOMA experiment are returned unchanged.

    Returns
    -------
    A :class:`~pathlib.Path` for local files. For URLs a ``UPath``, which has the same methods but is not an instance of
    Path.

    Raises
    ------
    ImportError
        If a package for this kind of URL is missing.
    ValueError
        If the kind of URL is unknown.
    """
    if not isinstance(source, str | PathLike):
        return cast(Path, source)
    if "://" not in str(source):
        return Path(source)
    path = from_extra("upath", "remote", f"{source!r} needs universal-pathlib").UPath(source)
    with reaching(path):
        _ = path.fs  # imports the file system
    return cast(Path, path)


@contextlib.contextmanager
def reaching(path: Any) -> Iterator[None]:
    """Add the URL and the remedy to errors of a remote file system; errors about the content pass unchanged.

    Parameters
    ----------
    path
        Result of :func:`as_path`; errors of local paths pass unchanged.

    Raises
    ------
    FileNotFoundError, ImportError, OSError
        If nothing exists at the URL, a package is missing, or the URL can't be reached.
    """
    try:
        yield
    except Exception as error:  # each file system has errors of its own
        # zarr's FileNotFoundErrors are ValueErrors too
        of_content = isinstance(error, KeyError | TypeError | ValueError) and not isinstance(error, OSError)
        if isinstance(path, Path) or of_content or repr(str(path)) in str(error):
            raise
        kind = next((kind for kind in (FileNotFoundError, ImportError) if isinstance(error, kind)), OSError)
        raise kind(
            f"{str(path)!r} can't be read ({type(error).__name__}: {error}). Is there such a bucket and key, and is "
            "its file system installed (pip install 'scdiva[remote]')? fsspec reads credentials and endpoints from the "
            "environment: AWS_PROFILE, AWS_ENDPOINT_URL, FSSPEC_S3_ANON=true for a public bucket, and so on."
        ) from error


def listing(path: Path) -> list[tuple[str, int, str]]:
    """List the files at a path without reading them.

    Returns
    -------
    For each file its name below the path, its size in bytes, and its version: modification time, ETag of an object, or
    whatever the file system offers. Empty for a folder on a server that can't list folders, such as most https servers.
    """
    from fsspec.core import url_to_fs

    with reaching(path):
        files, root = url_to_fs(str(path))
        files.invalidate_cache()
        entries = files.find(root, detail=True)
    return sorted(
        (name.removeprefix(root), int(info["size"] or 0), str(next((info[v] for v in _VERSIONS if info.get(v)), "")))
        for name, info in entries.items()
    )


def stamp(path: Path) -> str:
    """Checksum of the sizes and versions of a file, or of all files of a folder; it changes with the content."""
    return digest(path.note() if hasattr(path, "note") else listing(path))


def digest(value: Any) -> str:
    """SHA-256 of JSON values."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
