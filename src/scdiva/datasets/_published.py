"""Published data sets by name: found in a folder, or downloaded from a mirror, and held against their checksums."""

from __future__ import annotations

import csv
import os
from importlib import resources
from pathlib import Path

from anndata import AnnData, read_h5ad

from scdiva._settings import settings


def pbmc3k(path: str | os.PathLike[str] | None = None) -> AnnData:
    """Give 2,700 peripheral blood mononuclear cells of one healthy donor, with all genes: 10x Genomics' PBMC 3k.

    The cells of scanpy's and Seurat's first tutorials [1]_, with the labels of the latter.

    Parameters
    ----------
    path
        A copy of yours, read as it is, unchecked. None looks for the published one, see :doc:`/datasets`.

    Returns
    -------
    AnnData
        2,700 × 32,738 counts (CSR, float32). `obs["cell_type"]`: nine types, and `"unlabelled"` for the 62 cells that
        the tutorial filters.

    Raises
    ------
    FileNotFoundError
        If there is no copy, and no mirror is named.
    ValueError
        If a file of that name is another one.

    References
    ----------
    .. [1] Zheng et al., Massively parallel digital transcriptional profiling of single cells, Nature Communications 8,
       14049, 2017.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.pbmc3k()  # doctest: +SKIP
    """
    return _read("pbmc3k", path)


def kang(path: str | os.PathLike[str] | None = None) -> AnnData:
    """Give 12,261 unstimulated blood cells of eight lupus patients, run together and distinguished by their genotypes.

    The control cells of Kang et al. [1]_, cut to 1,287 genes.

    Parameters
    ----------
    path
        A copy of yours, read as it is, unchecked. None looks for the published one, see :doc:`/datasets`.

    Returns
    -------
    AnnData
        12,261 × 1,287 counts (CSR, float32). `obs["cell_type"]`: eight types; `obs["donor"]`: eight, categorical.

    Raises
    ------
    FileNotFoundError
        If there is no copy, and no mirror is named.
    ValueError
        If a file of that name is another one.

    References
    ----------
    .. [1] Kang et al., Multiplexed droplet single-cell RNA-sequencing using natural genetic variation, Nature
       Biotechnology 36, 89, 2018 (GSE96583).

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.kang()  # doctest: +SKIP
    """
    adata = _read("kang", path)
    adata.obs["donor"] = adata.obs["donor"].astype(str).astype("category")  # stored as numbers
    return adata


def pancreas(path: str | os.PathLike[str] | None = None) -> AnnData:
    """Give 500 cells of human pancreatic islets, measured by five technologies.

    Baron, Muraro, Grün, Segerstolpe and Lawlor et al. [1]_ [2]_ [3]_ [4]_ [5]_, 100 cells a technology, cut to 2,000
    variable genes. Scales differ: molecules (inDrop, CEL-seq) and reads (Smart-seq2, Fluidigm C1).

    Parameters
    ----------
    path
        A copy of yours, read as it is, unchecked. None looks for the published one, see :doc:`/datasets`.

    Returns
    -------
    AnnData
        500 × 2,000 counts, not all of them whole (CSR, float32). `obs["cell_type"]`: six types; `obs["assay"]`: five
        technologies; `obs["batch"]`: eight, the donors of inDrop apart.

    Raises
    ------
    FileNotFoundError
        If there is no copy, and no mirror is named.
    ValueError
        If a file of that name is another one.

    References
    ----------
    .. [1] Baron et al., Cell Systems 3, 346, 2016 (GSE84133).
    .. [2] Muraro et al., Cell Systems 3, 385, 2016 (GSE85241).
    .. [3] Grün et al., Cell Stem Cell 19, 266, 2016 (GSE81076).
    .. [4] Segerstolpe et al., Cell Metabolism 24, 593, 2016 (E-MTAB-5061).
    .. [5] Lawlor et al., Genome Research 27, 208, 2017 (GSE86469).

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.pancreas()  # doctest: +SKIP
    """
    return _read("pancreas", path)


def norman(path: str | os.PathLike[str] | None = None) -> AnnData:
    """Give 3,375 cells of a CRISPR activation screen of single genes and pairs in K562, with 500 genes.

    A subset of Norman et al. [1]_, as PerturBench [2]_ keeps it for its tests.

    Parameters
    ----------
    path
        A copy of yours, read as it is, unchecked. None looks for the published one, see :doc:`/datasets`.

    Returns
    -------
    AnnData
        3,375 × 500 counts, recovered from log values (CSR, float32). `obs["perturbation"]`: genes, pairs written
        `"A+B"`, and `"control"`.

    Raises
    ------
    FileNotFoundError
        If there is no copy, and no mirror is named.
    ValueError
        If a file of that name is another one.

    References
    ----------
    .. [1] Norman et al., Exploring genetic interaction manifolds constructed from rich single-cell phenotypes, Science
       365, 786, 2019 (GSE133344).
    .. [2] Wu et al., PerturBench: benchmarking machine learning models for cellular perturbation analysis,
       arXiv:2408.10609, 2024.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.norman()  # doctest: +SKIP
    """
    adata = _read("norman", path)
    return adata[adata.obs["batch"] == "norman19"].copy()  # another screen lies in the same file


def mouse_brain(path: str | os.PathLike[str] | None = None) -> AnnData:
    """Give 550 cells of mouse cortex and hippocampus, 50 of each of eleven types.

    A subset of Zeisel et al. [1]_, measured by STRT-seq with molecules counted.

    Parameters
    ----------
    path
        A copy of yours, read as it is, unchecked. None looks for the published one, see :doc:`/datasets`.

    Returns
    -------
    AnnData
        550 × 19,972 counts of mouse genes (CSR, float32). `obs["cell_type"]`: eleven types.

    Raises
    ------
    FileNotFoundError
        If there is no copy, and no mirror is named.
    ValueError
        If a file of that name is another one.

    References
    ----------
    .. [1] Zeisel et al., Cell types in the mouse cortex and hippocampus revealed by single-cell RNA-seq, Science 347,
       1138, 2015 (GSE60361).

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.mouse_brain()  # doctest: +SKIP
    """
    return _read("mouse_brain", path)


def mouse_pancreas(path: str | os.PathLike[str] | None = None) -> AnnData:
    """Give 739 cells of the mouse pancreas at embryonic day 15.5, from duct to endocrine cells.

    A subset of Bastidas-Ponce et al. [1]_; its types lie along a continuum.

    Parameters
    ----------
    path
        A copy of yours, read as it is, unchecked. None looks for the published one, see :doc:`/datasets`.

    Returns
    -------
    AnnData
        739 × 7,192 spliced counts of mouse genes (CSR, float32). `obs["cell_type"]`: eight types.

    Raises
    ------
    FileNotFoundError
        If there is no copy, and no mirror is named.
    ValueError
        If a file of that name is another one.

    References
    ----------
    .. [1] Bastidas-Ponce et al., Comprehensive single cell mRNA profiling reveals a detailed roadmap for pancreatic
       endocrinogenesis, Development 146, dev173849, 2019 (GSE132188).

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.mouse_pancreas()  # doctest: +SKIP
    """
    return _read("mouse_pancreas", path)


def folder_of_data() -> Path:
    """Return the folder in which data sets are kept."""
    import pooch

    return Path(settings.data_dir or os.environ.get("SCDIVA_DATA_DIR") or pooch.os_cache("scdiva"))


def mirror_of_data() -> str:
    """Return the address that data sets are downloaded from; empty: none is named."""
    return (settings.data_url or os.environ.get("SCDIVA_DATA_URL", "")).rstrip("/")


def _read(name: str, path: str | os.PathLike[str] | None) -> AnnData:
    """Read the user's copy, the one in the folder of data sets, or one that is downloaded into it."""
    if path is not None:
        return read_h5ad(path)
    import pooch

    with resources.files("scdiva.datasets").joinpath("published.tsv").open(encoding="utf-8") as table:
        entry = {row["name"]: row for row in csv.DictReader(table, delimiter="\t")}[name]
    folder, mirror = folder_of_data(), mirror_of_data()
    file = folder / entry["file"]
    if not file.is_file() and not mirror:
        raise FileNotFoundError(
            f"{file} is not there, and no mirror is named to download it from. Put a copy there, name a mirror "
            f"(sd.settings.data_url), or pass path=. It was made from {entry['source']}; no public address has the "
            "h5ad file itself."
        )
    if file.is_file() and pooch.file_hash(str(file)) != entry["sha256"]:  # which pooch would write over
        raise ValueError(f"{file} is not the published file, its SHA-256 differs: move it, or pass path= to read it")
    address, known = f"{mirror}/{entry['file']}", f"sha256:{entry['sha256']}"
    return read_h5ad(pooch.retrieve(address, known, entry["file"], folder, progressbar=settings.progress))
