"""Files: where results may be written, atomic writes, and size limits for files from untrusted sources."""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
import re
import shutil
import stat
import time
import unicodedata
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from scdiva._settings import logger

MOST_TEXT = 1 << 24
"""Bytes of the largest text file (configuration, model card) that is read."""
MOST_INDEX = 1 << 26
"""Bytes of the largest index: that of a packed corpus of 150,000 parts, or what describes the arrays of a zarr."""
MOST_VALUES, MOST_DEPTH = 2_000_000, 64
"""Values of the largest JSON or YAML file that is parsed, and how deep they may be nested."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Numbers of the system's errors for a disk that is full."""
_STALE = 60.0
"""Seconds after which an unlocked temporary file belongs to no process that is alive."""
_BIDIRECTIONAL = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


# --- reading ----------------------------------------------------------------------------------------------------------
def printable(text: str) -> str:
    r"""Escape control characters, which a terminal would obey; newlines and tabs are kept.

    Parameters
    ----------
    text
        Text that may come from a file. An escape character becomes ``\u001b``, as in JSON.
    """
    if text.isprintable():
        return text
    return "".join(
        f"\\u{ord(one):04x}"
        if (unicodedata.category(one) == "Cc" and one not in "\n\t") or one in _BIDIRECTIONAL
        else one
        for one in text
    )


def check_regular(path: str | os.PathLike[str], limit: int | None = None) -> int:
    """Refuse what is not a regular file (reading a FIFO may wait forever), or is too large.

    Parameters
    ----------
    path
        An existing path; links are followed.
    limit
        Maximum size in bytes.

    Returns
    -------
    The size in bytes.

    Raises
    ------
    ValueError
        If it is a device, FIFO or socket, or larger than that.
    """
    found = os.stat(path)
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{str(path)!r} is not a regular file. Copy its content to a file.")
    if limit is not None and found.st_size > limit:
        raise ValueError(
            f"{str(path)!r} has {found.st_size:,} bytes, and at most {limit:,} are read: it is damaged or is no file "
            "of this kind. Fetch or write it anew."
        )
    return found.st_size


def read_bytes(path: str | os.PathLike[str], limit: int = MOST_TEXT) -> bytes:
    """Read a file, or raise an error if it is larger than a limit.

    Parameters
    ----------
    path
        A regular file.
    limit
        Maximum size in bytes.

    Raises
    ------
    ValueError
        If it is larger, or no regular file.
    MemoryError
        If there is no memory for it; the message names it.
    """
    n_bytes = check_regular(path, limit)
    try:
        with open(path, "rb") as file:
            return file.read(n_bytes)
    except MemoryError:
        raise MemoryError(f"{str(path)!r} has {n_bytes:,} bytes, which do not fit into memory.") from None


def parse_json(path: str | os.PathLike[str], data: bytes) -> Any:
    """Parse the content of a JSON file.

    Parameters
    ----------
    path
        The file, for messages.
    data
        Its content.

    Raises
    ------
    ValueError
        If it is no JSON, has too many values or is nested too deep.
    """
    if sum(map(data.count, (b"[", b"{", b","))) > MOST_VALUES:
        raise ValueError(f"{path} is no JSON that is read: it has more than {MOST_VALUES:,} values.")
    try:
        found = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError, MemoryError) as error:  # numbers of 5,000 digits and lists a thousand deep too
        raise ValueError(f"{path} is no JSON: {error!s:.300}") from error
    level, depth = [found], 0
    while level:
        if (depth := depth + 1) > MOST_DEPTH:
            raise ValueError(f"{path} is no JSON that is read: it is nested more than {MOST_DEPTH} deep.")
        nested = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        level = [part for one in nested for part in one]
    return found


def parse_yaml(path: str | os.PathLike[str], data: bytes, loader: Any = None) -> Any:
    """Parse the content of a YAML file as :func:`parse_json` does, with a `loader` class; aliases are refused.

    A few aliases can stand for billions of values.
    """
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
    """Make a local path of where a user wants a result.

    Parameters
    ----------
    path
        What the user gave.
    name
        The argument, for the message.

    Raises
    ------
    ValueError
        If it is a URL: a folder with the name of its scheme would be made.
    TypeError
        If it is no path.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{name} must be a path, got {type(path).__name__}.")
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(path)):  # also of a Path, which has made one slash of two
        raise ValueError(
            f"{name}={str(path)!r} is a URL, and results are written to a local path: pass one, and copy the finished "
            "result to the URL."
        )
    return Path(path).expanduser()


@contextlib.contextmanager
def naming_output(out: Path) -> Iterator[None]:
    """Let an error of a full disk name the output and the remedy.

    Parameters
    ----------
    out
        The file or folder that the block writes.

    Raises
    ------
    OSError
        With the system's number.
    """
    try:
        yield
    except OSError as error:
        # a temporary file of ours is hidden; the name of any other is right as it is
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
    """Refuse to write where there is not enough room.

    Parameters
    ----------
    out
        The file to write, in an existing folder.
    n_bytes
        Lower bound of its size.

    Raises
    ------
    OSError
        If the disk has less free space than that.
    """
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
    """Give a path beside `out` to be written, and put it in the place of `out` if the block ends well.

    Its name is always the same, so that what a killed run left there is found and deleted; one call at a time.

    Parameters
    ----------
    out
        The file or folder to be; one that is there is replaced.

    Yields
    ------
    Path
        Where to write.

    Raises
    ------
    RuntimeError
        If another call is writing the same.
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
    """Delete what stands beside an output, or put its old content back if it has none; whoever calls has it locked."""
    new, old = beside(out, "new"), beside(out, "old")
    with contextlib.suppress(OSError):
        delete(new)
    if os.path.lexists(old) and not os.path.lexists(out):
        old.rename(out)
    delete(old)
    out.with_name(f".{out.name}.writing").unlink(missing_ok=True)


def tidy(out: Path) -> None:
    """Delete what a killed call left beside its output.

    Parameters
    ----------
    out
        The file or folder that :func:`whole_or_not` wrote.
    """
    with open_alone(out.with_name(f".{out.name}.writing")):
        _settle(out)


def beside(out: Path, state: str) -> Path:
    """Name the hidden neighbour of an output that holds its ``"new"`` or ``"old"`` content while it is replaced."""
    return out.with_name(f".{out.stem}.{state}{out.suffix}")


def put_whole(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Write a file atomically: it is on the disk before it gets its name.

    Several processes may write the same file. Temporary files of killed ones are deleted.

    Parameters
    ----------
    path
        The file; one that is there is replaced.
    write
        Writes to the open file that it is given.

    Raises
    ------
    OSError
        If the disk is full, among others; the message names `path`.
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
    """Delete a temporary file that no living process writes."""
    with contextlib.suppress(OSError):
        if time.time() - path.stat().st_mtime > _STALE:
            with path.open("rb") as file:
                if _lock(file):
                    path.unlink(missing_ok=True)


def open_alone(path: Path, *, waits: bool = False) -> BinaryIO:
    """Open a file to be appended to, for one call at a time.

    The lock goes with the open file, so that a killed process leaves none behind.

    Parameters
    ----------
    path
        The file; made if it is not there. Who holds it may delete it.
    waits
        Whether to wait for whoever has it open.

    Raises
    ------
    RuntimeError
        If it is open elsewhere, and this does not wait.
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
            logger.warning("%s can't be locked (%s): calls that begin at once don't know of each other", path, error)
        # its last owner may have deleted it between our opening and our lock
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
        file.close()


def delete(path: Path) -> None:
    """Delete a file, a folder with its content, or a link, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
