"""What to cite, and what is installed: for a methods section and for a report of a bug."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Mapping
from importlib import metadata

from scdiva._version import __version__

TITLE = "scdiva"
ABSTRACT = "Single-cell embeddings from a masked discrete diffusion model of genes and their expression."
DEVELOPERS = "The scdiva developers"
LICENSE = "BSD-3-Clause"
YEAR = 2026

PAPER = "ScDiVa: Masked Discrete Diffusion for Joint Modeling of Single-Cell Identity and Expression"
PAPER_YEAR = 2026
PAPER_STATUS = "preprint"
PAPER_AUTHORS = (
    ("Wang", "Mingxuan"),
    ("Chen", "Cheng"),
    ("Jiang", "Gaoyang"),
    ("Ren", "Zijia"),
    ("Zhao", "Chuangxin"),
    ("Shi", "Lu"),
    ("Ma", "Yanbiao"),
)
"""Names as (family, given). CITATION.cff says the same, which a test holds against this."""


def cite() -> str:
    """Give what to cite, as BibTeX: this package in its version, and the paper whose method it builds.

    Returns
    -------
    Two BibTeX entries, `scdiva` and `wang2026scdiva`.

    Examples
    --------
    >>> import scdiva as sd
    >>> print(sd.cite().splitlines()[0])
    @software{scdiva,
    """
    title, authors = f"{{{TITLE}}}: {ABSTRACT}".rstrip("."), " and ".join(map(", ".join, PAPER_AUTHORS))
    software = {"title": title, "author": f"{{{DEVELOPERS}}}", "year": YEAR, "version": __version__, "license": LICENSE}
    paper = {"title": f"{{{PAPER}}}", "author": authors, "year": PAPER_YEAR, "note": PAPER_STATUS.capitalize()}
    return f"{_entry('software', 'scdiva', software)}\n\n{_entry('misc', 'wang2026scdiva', paper)}"


def print_versions() -> None:
    """Print what is installed: scdiva, Python, the machine, and each package that scdiva uses or can use.

    Paste it into a report of a bug. Beside torch, whose threads and devices it tells, nothing is imported.

    Returns
    -------
    Nothing; it is written to stdout.

    Examples
    --------
    >>> import scdiva as sd
    >>> sd.print_versions()  # doctest: +SKIP
    scdiva       0.1.0
    Python       3.11.9
    ...
    """
    try:
        wanted = metadata.requires("scdiva") or []
    except metadata.PackageNotFoundError:  # run from its source, never installed
        wanted = ["numpy", "scipy", "pandas", "anndata", "scanpy", "torch", "pytorch-lightning"]
    names = {found[0] for line in wanted if (found := re.match(r"[\w.-]+", line))} - {"scdiva"}
    rows = [
        ("scdiva", __version__),
        ("Python", platform.python_version()),
        ("platform", platform.platform()),
        ("processor", f"{platform.machine()}, {os.cpu_count()} cores"),
        *((name, _installed(name)) for name in sorted(names)),
        *_of_torch(),
    ]
    sys.stdout.writelines(f"{name:<20} {value}\n" for name, value in rows)


def _entry(kind: str, key: str, values: Mapping[str, object]) -> str:
    lines = ",\n".join(f"  {name} = {{{value}}}" for name, value in values.items())
    return f"@{kind}{{{key},\n{lines}\n}}"


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _of_torch() -> list[tuple[str, str]]:
    """Say what torch computes on; a torch that can't be imported is a finding too."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return [("torch says", f"{type(error).__name__}: {error}")]
    devices = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    built = torch.version.cuda or torch.version.hip or "none"
    threads = f"{torch.get_num_threads()} (OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'unset')})"
    return [
        ("CUDA", f"{built}, {', '.join(devices) or 'no device'}"),
        ("MPS", "yes" if torch.backends.mps.is_available() else "no"),
        ("threads of torch", threads),
    ]
