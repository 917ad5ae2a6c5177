"""Complete published screens as scverse hosts them, downloaded on request, with labels as `scdiva.tl` reads them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pandas as pd
from anndata import AnnData, read_h5ad

from scdiva._settings import settings
from scdiva._version import __version__
from scdiva.datasets._published import folder_of_data, mirror_of_data

ADDRESS = "https://exampledata.scverse.org/pertpy"
_HEADERS = {"User-Agent": f"scdiva/{__version__}"}
"""The server refuses the default name of Python's clients."""
_MISSING = {"", "*", "nan", "none", "na"}
_CONTROL = re.compile(r"(negctrl\d*|ctrl|control|3x|neg)", flags=re.IGNORECASE)
"""Parts of a label that target no gene."""
_ADAMSON_CONTROL = re.compile(r"(62\(mod\)|63\(mod\)|Gal4-4\(mod\)|3x_neg_ctrl|control$)")


def norman_2019(path: str | os.PathLike[str] | None = None, *, download: bool = False) -> AnnData:
    """Load the complete CRISPR activation screen of Norman et al.: single genes and pairs in K562, all genes.

    Parameters
    ----------
    path
        A copy of `norman_2019_raw.h5ad` or `norman_2019.h5ad`, read without a checksum. None: the file in the data
        folder, see :doc:`/datasets`.
    download
        Download `norman_2019_raw.h5ad` (about 1.7 GB) if it is not in the data folder.

    Returns
    -------
    AnnData
        About 111,000 cells × 33,694 genes, counts. `obs["perturbation"]`, categorical: genes, pairs written `"A+B"`,
        `"control"`, missing for cells without a guide.

    Raises
    ------
    FileNotFoundError
        If there is no copy and `download` is False; the message states the size.
    ConnectionError
        If the download fails.
    ValueError
        If the file has changed since it was downloaded, or has no column of perturbations.

    References
    ----------
    .. [1] Norman et al., Exploring genetic interaction manifolds constructed from rich single-cell phenotypes, Science
       365, 786, 2019 (GSE133344).

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.norman_2019(download=True)  # doctest: +SKIP
    """
    adata = _read("norman_2019", "norman_2019_raw.h5ad", path, download)
    return _labelled(adata, ("perturbation_name", "guide_identity", "guide_merged"), _norman_label)


def adamson_2016(path: str | os.PathLike[str] | None = None, *, download: bool = False) -> AnnData:
    """Load the CRISPR interference screen of Adamson et al. of the unfolded protein response in K562, all genes.

    Parameters
    ----------
    path
        A copy of `adamson_2016_upr_perturb_seq.h5ad`, read without a checksum. None: the file in the data folder, see
        :doc:`/datasets`.
    download
        Download the file if it is not in the data folder.

    Returns
    -------
    AnnData
        Cells × genes, counts. `obs["perturbation"]`, categorical: the gene of each guide, `"control"` for non-targeting
        guides, missing for cells without a guide. `obs["guide"]`: the guide as published, such as `"SPI1_pDS255"`.

    Raises
    ------
    FileNotFoundError
        If there is no copy and `download` is False; the message states the size.
    ConnectionError
        If the download fails.
    ValueError
        If the file has changed since it was downloaded, or has no column of perturbations.

    References
    ----------
    .. [1] Adamson et al., A multiplexed single-cell CRISPR screening platform enables systematic dissection of the
       unfolded protein response, Cell 167, 1867, 2016 (GSE90546).

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.adamson_2016(download=True)  # doctest: +SKIP
    """
    adata = _read("adamson_2016", "adamson_2016_upr_perturb_seq.h5ad", path, download)
    return _labelled(adata, ("guide", "perturbation", "guide_identity"), _adamson_label, keep="guide")


def kang_2018(path: str | os.PathLike[str] | None = None, *, download: bool = False) -> AnnData:
    """Load blood cells of eight lupus patients, unstimulated and after IFN-beta, all genes.

    Parameters
    ----------
    path
        A copy of `kang_2018.h5ad`, read without a checksum. None: the file in the data folder, see :doc:`/datasets`.
    download
        Download the file if it is not in the data folder.

    Returns
    -------
    AnnData
        About 24,700 cells × genes, counts. `obs["perturbation"]`, categorical: `"control"` and `"IFN-beta"`;
        `obs["donor"]` and `obs["cell_type"]` where the file has them.

    Raises
    ------
    FileNotFoundError
        If there is no copy and `download` is False; the message states the size.
    ConnectionError
        If the download fails.
    ValueError
        If the file has changed since it was downloaded, or has no column of stimulation.

    References
    ----------
    .. [1] Kang et al., Multiplexed droplet single-cell RNA-sequencing using natural genetic variation, Nature
       Biotechnology 36, 89, 2018 (GSE96583).

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.kang_2018(download=True)  # doctest: +SKIP
    """
    adata = _labelled(_read("kang_2018", "kang_2018.h5ad", path, download), ("label", "stim", "condition"), _kang_label)
    if "replicate" in adata.obs:
        adata.obs["donor"] = adata.obs["replicate"].astype(str).astype("category")
    return adata


def _read(call: str, name: str, path: str | os.PathLike[str] | None, download: bool) -> AnnData:
    """Read a copy, or the file in the data folder, downloaded if asked for; counts become X."""
    adata = read_h5ad(_file(call, name, download) if path is None else path)
    if "counts" in adata.layers:
        adata.X = adata.layers.pop("counts")
    return adata


def _file(call: str, name: str, download: bool) -> Path:
    """Return the file in the data folder; download it if asked for, and keep its checksum next to it."""
    import pooch

    folder = folder_of_data()
    file, sums = folder / name, folder / f"{name}.sha256"
    if file.is_file():
        if sums.is_file() and pooch.file_hash(str(file)) != sums.read_text().split()[0]:
            raise ValueError(
                f"{file} has changed since it was downloaded (its SHA-256 is not that in {sums.name}). Move it and "
                f"call sd.datasets.{call}(download=True), or pass path= to read it as it is."
            )
        return file
    address = f"{mirror_of_data() or ADDRESS}/{name}"
    if not download:
        raise FileNotFoundError(
            f"{file} is not there. sd.datasets.{call}(download=True) downloads {_size(address)} from {address}; or put "
            "a copy there, or pass path=."
        )
    downloader = pooch.HTTPDownloader(progressbar=settings.progress, headers=_HEADERS)
    try:
        pooch.retrieve(address, None, name, folder, downloader=downloader)
    except OSError as error:  # of requests too
        raise ConnectionError(
            f"{address} could not be downloaded: {str(error)[:200]}. Download it another way and pass path=."
        ) from error
    sums.write_text(f"{pooch.file_hash(str(file))}  {name}\n")
    return file


def _size(address: str) -> str:
    """Ask the server for the size of a file."""
    import requests

    try:
        answer = requests.head(address, headers=_HEADERS, timeout=10, allow_redirects=True)
        answer.raise_for_status()
        n_bytes = int(answer.headers["Content-Length"])
    except (OSError, KeyError, ValueError):
        return "the file (size unknown: the server does not answer)"
    return f"{n_bytes / 1e9:.1f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:.1f} MB"


def _labelled(
    adata: AnnData, columns: tuple[str, ...], label: Callable[[str], str], keep: str | None = None
) -> AnnData:
    """Write `obs["perturbation"]` from the first of these columns that there is; keep the column itself as `keep`."""
    found = next((column for column in columns if column in adata.obs), None)
    if found is None:
        raise ValueError(
            f"obs has none of the columns {', '.join(columns)}; it has {', '.join(map(str, adata.obs.columns))}. "
            'Read the file with anndata.read_h5ad and write obs["perturbation"] yourself: "control", "A" or "A+B".'
        )
    given = adata.obs[found].astype(object).where(adata.obs[found].notna(), "").astype(str)
    names = {text: label(text) if text.lower() not in _MISSING else None for text in given.unique()}
    if keep is not None:
        adata.obs[keep] = given.where(~given.str.lower().isin(_MISSING)).astype("category")
    adata.obs["perturbation"] = pd.Categorical(given.map(names))
    return adata


def _norman_label(text: str) -> str:
    """Turn `"A+B"`, or guides such as `"A_NegCtrl0__A_NegCtrl0"`, into the targeted genes."""
    parts = re.split(r"[+_]", text.split("__")[0])
    return _joined(parts)


def _adamson_label(text: str) -> str:
    """Turn a guide such as `"SPI1_pDS255"` into its gene; several genes of a guide are a combination."""
    if _ADAMSON_CONTROL.match(text):
        return "control"
    genes = re.sub(r"(_only)?(_p[A-Z]{2}\d+(-\d+)?)?$", "", text)
    return _joined(re.split(r"[+_]", genes))


def _joined(parts: list[str]) -> str:
    return "+".join(sorted({part for part in parts if part and not _CONTROL.fullmatch(part)})) or "control"


def _kang_label(text: str) -> str:
    return {"ctrl": "control", "control": "control", "stim": "IFN-beta", "stimulated": "IFN-beta"}.get(
        text.lower(), text
    )
