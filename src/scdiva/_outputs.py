"""Whether a file can be written where it is asked for, found out before any work."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def refuse_unwritable(out: Path) -> None:
    """Refuse a path in a folder that can't be written into, or can't be made.

    Parameters
    ----------
    out
        The file or folder to be. Nothing is left behind.

    Raises
    ------
    OSError
        With the kind and number of the system's own error, and the folder that is in the way.
    """
    folder = out.absolute().parent
    while not os.path.lexists(folder):  # folders above are made by whoever writes
        folder = folder.parent
    try:
        # tried, not asked for: rights alone don't know of read-only disks, nor of what stands where a folder should
        with tempfile.TemporaryFile(dir=folder):
            return
    except OSError as error:
        why = "is no folder" if not folder.is_dir() else "can't be written into"
        raise OSError(
            error.errno,
            f"{os.strerror(error.errno or 0)}: {str(folder)!r} {why}. Pass another path than",
            str(out),
        ) from error
