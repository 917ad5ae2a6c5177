"""Citation of the package, and versions of the installed packages."""

from __future__ import annotations

import os
import platform
import re
import sys
from importlib import metadata

from scdiva._version import __version__

_BIBTEX = f"""\
@software{{scdiva,
  title = {{{{scdiva}}: Single-cell embeddings from a masked discrete diffusion model of genes and their expression}},
  author = {{{{The scdiva developers}}}},
  year = {{2026}},
  version = {{{__version__}}},
  license = {{BSD-3-Clause}}
}}

@misc{{wang2026scdiva,
  title = {{{{ScDiVa: Masked Discrete Diffusion for Joint Modeling of Single-Cell Identity and Expression}}}},
  author = {{Wang, Mingxuan and Chen, Cheng and Jiang, Gaoyang and Ren, Zijia and Zhao, Chuangxin and Shi, Lu and \
Ma, Yanbiao}},
  year = {{2026}},
  note = {{Preprint}}
}}"""


def cite() -> str:
    """BibTeX entries of this version of the package and of the paper that describes the method.

    Returns
    -------
    Two entries, `scdiva` and `wang2026scdiva`.

    Examples
    --------
    >>> import scdiva as sd
    >>> print(sd.cite().splitlines()[0])
    @software{scdiva,
    """
    return _BIBTEX


def print_versions() -> None:
    """Print the versions of scdiva, Python, and all required and optional packages, and the devices of torch.

    Include the output in bug reports. Of the packages, only torch is imported.

    Returns
    -------
    Nothing; it is written to stdout.

    Examples
    --------
    >>> import scdiva as sd
    >>> sd.print_versions()  # doctest: +SKIP
    scdiva       0.2.0
    Python       3.11.9
    ...
    """
    try:
        required = metadata.requires("scdiva") or []
    except metadata.PackageNotFoundError:  # run from source
        required = ["numpy", "scipy", "pandas", "anndata", "scanpy", "torch", "pytorch-lightning"]
    names = {match[0] for line in required if (match := re.match(r"[\w.-]+", line))} - {"scdiva"}
    rows = [
        ("scdiva", __version__),
        ("Python", platform.python_version()),
        ("platform", platform.platform()),
        ("processor", f"{platform.machine()}, {os.cpu_count()} cores"),
        *((name, _version(name)) for name in sorted(names)),
        *_torch_devices(),
    ]
    sys.stdout.writelines(f"{name:<20} {value}\n" for name, value in rows)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _torch_devices() -> list[tuple[str, str]]:
    """Devices and threads of torch, or the error of its import."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return [("torch says", f"{type(error).__name__}: {error}")]
    devices = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    cuda = torch.version.cuda or torch.version.hip or "none"
    threads = f"{torch.get_num_threads()} (OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'unset')})"
    return [
        ("CUDA", f"{cuda}, {', '.join(devices) or 'no device'}"),
        ("MPS", "yes" if torch.backends.mps.is_available() else "no"),
        ("threads of torch", threads),
    ]
