"""Published datasets by name, with the columns of `obs` that the tutorials use."""

from __future__ import annotations

import csv
import hashlib
import os
import re
import tempfile
import warnings
from collections.abc import Callable
from http.client import responses
from importlib import resources
from pathlib import Path

import numpy as np
import pandas as pd
from anndata import AnnData, OldFormatWarning, read_h5ad
from scipy.sparse import csr_matrix

from scdiva._settings import progress_bar, settings
from scdiva._version import __version__

# --- download ---------------------------------------------------------------------------------------------------------
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
        Whether the complete dataset may be downloaded if it is larger than 100 MB. If so, a smaller file is not read
        instead.
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
        what = "was cut off" if h5py.is_hdf5(part) else f"is not an h5ad file, it begins with {ascii(begins)[2:-1]!r}"
        raise ValueError(f"The download from {address} {what}. {remedy}") from None
    if sums and (checksum := _sha256(part)) not in sums:
        raise ValueError(
            f"The download from {address} is not the published file: its SHA-256 is {checksum}, not "
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


# --- datasets ---------------------------------------------------------------------------------------------------------
_MISSING = {"", "*", "nan", "none", "na"}
_CONTROL = re.compile(r"(negctrl\d*|ctrl|control|3x|neg)", flags=re.IGNORECASE)
"""Parts of a label that target no gene."""
_ADAMSON_CONTROL = re.compile(r"(62\(mod\)|63\(mod\)|Gal4-4\(mod\)|3x_neg_ctrl|control$)")


def pbmc3k(path: str | os.PathLike[str] | None = None) -> AnnData:
    """2,700 peripheral blood mononuclear cells of one healthy donor: 10x Genomics' PBMC 3k, all genes.

    The dataset of scanpy's and Seurat's first tutorials [1]_, with the cell types of the latter. The first call
    downloads 5.9 MB.

    Parameters
    ----------
    path
        A copy of the file, read without a checksum. None: the file in the data folder, or the public one, see
        :doc:`/datasets`.

    Returns
    -------
    AnnData
        2,700 cells × 32,738 genes, counts (CSR, float32). `obs["cell_type"]`, categorical: nine cell types, and
        `"unlabelled"` for the 62 cells that the tutorial filters.

    Raises
    ------
    ConnectionError
        If the download fails.
    ValueError
        If the file is not the published one, or `path` holds other cells.

    References
    ----------
    .. [1] Zheng et al., Massively parallel digital transcriptional profiling of single cells, Nature Communications 8,
       14049, 2017.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.pbmc3k()  # doctest: +SKIP
    """
    adata = _read(path, "pbmc3k")
    if "cell_type" not in adata.obs:
        with resources.files("scdiva.datasets").joinpath("pbmc3k_cell_types.tsv").open(encoding="utf-8") as lines:
            types = pd.read_csv(lines, sep="\t", index_col="barcode")["cell_type"]
        cells = adata.obs_names.str.replace(r"-\d+$", "", regex=True)
        if not cells.isin(types.index).any():
            raise ValueError(
                f"None of the {adata.n_obs} cells is one of PBMC 3k's: the first is {adata.obs_names[:1].tolist()}, "
                'not like "AAACATACAACCAC-1". Read a dataset of your own with anndata.read_h5ad.'
            )
        adata.obs["cell_type"] = pd.Categorical(types.reindex(cells).fillna("unlabelled"))
    return adata


def kang(path: str | os.PathLike[str] | None = None) -> AnnData:
    """Blood cells of eight lupus patients, unstimulated and stimulated with interferon beta.

    The complete dataset of Kang et al. [1]_ as scverse hosts it; the first call downloads 38 MB. If the data folder or
    the mirror has only `kang_pbmc_12k_1287g.h5ad`, its 12,261 unstimulated cells and 1,287 genes are read.

    Parameters
    ----------
    path
        A copy of the file, read without a checksum. None: the file in the data folder, or the public one, see
        :doc:`/datasets`.

    Returns
    -------
    AnnData
        24,673 cells × 15,706 genes, counts (CSR, float32). `obs["cell_type"]`: eight cell types; `obs["donor"]` and
        `obs["batch"]`: eight donors; `obs["perturbation"]`: `"control"` and `"IFN-beta"`.

    Raises
    ------
    ConnectionError
        If the download fails.
    ValueError
        If the file is not the published one, or `path` has no column of stimulation.

    References
    ----------
    .. [1] Kang et al., Multiplexed droplet single-cell RNA-sequencing using natural genetic variation, Nature
       Biotechnology 36, 89, 2018 (GSE96583).

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.kang()  # doctest: +SKIP
    >>> control = adata[adata.obs["perturbation"] == "control"].copy()  # doctest: +SKIP
    """
    adata = _read(path, "kang")
    if adata.uns.get("source_path") == "data/kang_se.rda":  # the subset: unstimulated cells only
        adata.obs["donor"] = adata.obs["donor"].astype(str).astype("category")  # stored as numbers
        adata.obs["perturbation"] = pd.Categorical(["control"] * adata.n_obs)
        return adata
    _label(adata, ("label", "stim", "condition"), _kang_label)
    if "replicate" in adata.obs:
        adata.obs["donor"] = adata.obs["replicate"].astype(str).str.removeprefix("patient_").astype("category")
        adata.obs["batch"] = adata.obs["donor"]
    return adata


def norman(path: str | os.PathLike[str] | None = None, *, subset: bool = False, download: bool = False) -> AnnData:
    """CRISPR activation screen of single genes and pairs of genes in K562 cells.

    The complete screen of Norman et al. [1]_ as scverse hosts it, or the subset that PerturBench [2]_ uses for its
    tests.

    Parameters
    ----------
    path
        A copy of one of the files, read without a checksum. None: the file in the data folder, or the public one, see
        :doc:`/datasets`.
    subset
        Read the subset of 3,375 cells and 500 genes; the first call downloads 1.1 MB. If the data folder has
        `perturbench_devel_norman_mcfaline_5961_500g.h5ad` and not the complete screen, False reads that subset, too.
    download
        Download the complete screen, 1.7 GB, if it is not in the data folder.

    Returns
    -------
    AnnData
        About 111,000 cells × 33,694 genes, or 3,375 × 500, counts (CSR, float32). The subset's were recovered from log
        values. `obs["perturbation"]`, categorical: genes, pairs written `"A+B"`, `"control"`, missing for cells without
        a guide.

    Raises
    ------
    FileNotFoundError
        If the complete screen is not in the data folder and `download` is False; the message states the size.
    ConnectionError
        If the download fails.
    ValueError
        If the file is not the published one, or `path` has no column of perturbations or is passed with `subset`.

    References
    ----------
    .. [1] Norman et al., Exploring genetic interaction manifolds constructed from rich single-cell phenotypes, Science
       365, 786, 2019 (GSE133344).
    .. [2] Wu et al., PerturBench: benchmarking machine learning models for cellular perturbation analysis,
       arXiv:2408.10609, 2024.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.norman(subset=True)  # doctest: +SKIP
    """
    if subset and path is not None:
        raise ValueError(f"path={os.fspath(path)!r} is read as it is: leave out subset=True, or path=.")
    if subset:
        adata = _read(None, "norman_subset")
    else:
        small = "sd.datasets.norman(subset=True) takes 3,375 cells and 500 genes, 1.1 MB. "
        adata = _read(path, "norman", download=download, instead=small)
    if {"dataset", "ncounts", "perturbation"} <= set(adata.obs):  # PerturBench's own file: log values of two screens
        adata = adata[adata.obs["dataset"] == "norman19"].copy()
        adata.X = _counts_of_logs(csr_matrix(adata.X), adata.obs["ncounts"].to_numpy(dtype=np.float64))
        adata.obs = adata.obs.rename(columns={"dataset": "batch", "ncounts": "ncounts_full"})
        adata.uns = {}  # scanpy takes uns["log1p"] for a sign of log values
    elif {"batch", "perturbation"} <= set(adata.obs) and (adata.obs["batch"] == "norman19").any():
        adata = adata[adata.obs["batch"] == "norman19"].copy()  # another screen is in the same file
    else:
        _label(adata, ("perturbation_name", "guide_identity", "guide_merged"), _norman_label)
    return adata


def adamson(path: str | os.PathLike[str] | None = None, *, download: bool = False) -> AnnData:
    """CRISPR interference screen of the unfolded protein response in K562 cells, all genes.

    The complete screen of Adamson et al. [1]_ as scverse hosts it.

    Parameters
    ----------
    path
        A copy of `adamson_2016_upr_perturb_seq.h5ad`, read without a checksum. None: the file in the data folder, or
        the public one, see :doc:`/datasets`.
    download
        Download the file, 0.5 GB, if it is not in the data folder.

    Returns
    -------
    AnnData
        About 65,000 cells × 32,738 genes, counts (CSR, float32). `obs["perturbation"]`, categorical: the gene of each
        guide, `"control"` for non-targeting guides, missing for cells without a guide. `obs["guide"]`: the guide as
        published, such as `"SPI1_pDS255"`.

    Raises
    ------
    FileNotFoundError
        If the file is not in the data folder and `download` is False; the message states the size.
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
    >>> adata = sd.datasets.adamson(download=True)  # doctest: +SKIP
    """
    adata = _read(path, "adamson", download=download)
    return _label(adata, ("guide", "perturbation", "guide_identity"), _adamson_label, keep="guide")


def pancreas(path: str | os.PathLike[str] | None = None) -> AnnData:
    """500 cells of human pancreatic islets, measured by five technologies.

    Baron, Muraro, Grün, Segerstolpe and Lawlor et al. [1]_ [2]_ [3]_ [4]_ [5]_, 100 cells per technology and 2,000
    variable genes. Counts are molecules (inDrop, CEL-seq, CEL-seq2) or reads (Smart-seq2, Fluidigm C1). The file has
    no public address, see :doc:`/datasets`.

    Parameters
    ----------
    path
        A copy of the file, read without a checksum. None: the file in the data folder or on the mirror.

    Returns
    -------
    AnnData
        500 cells × 2,000 genes, counts, some of them not whole numbers (CSR, float32). `obs["cell_type"]`: six cell
        types; `obs["assay"]`: five technologies; `obs["batch"]`: eight, one per donor for inDrop.

    Raises
    ------
    FileNotFoundError
        If there is no copy and no mirror is set; the message states the source.
    ConnectionError
        If the download fails.
    ValueError
        If the file is not the published one.

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
    >>> adata = sd.datasets.pancreas(path="islets.h5ad")  # doctest: +SKIP
    """
    return _read(path, "pancreas")


def mouse_brain(path: str | os.PathLike[str] | None = None) -> AnnData:
    """550 cells of mouse cortex and hippocampus, 50 of each of eleven cell types.

    A subset of Zeisel et al. [1]_, measured by STRT-seq with unique molecular identifiers. The file has no public
    address, see :doc:`/datasets`.

    Parameters
    ----------
    path
        A copy of the file, read without a checksum. None: the file in the data folder or on the mirror.

    Returns
    -------
    AnnData
        550 cells × 19,972 mouse genes, counts (CSR, float32). `obs["cell_type"]`: eleven cell types.

    Raises
    ------
    FileNotFoundError
        If there is no copy and no mirror is set; the message states the source.
    ConnectionError
        If the download fails.
    ValueError
        If the file is not the published one.

    References
    ----------
    .. [1] Zeisel et al., Cell types in the mouse cortex and hippocampus revealed by single-cell RNA-seq, Science 347,
       1138, 2015 (GSE60361).

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.mouse_brain(path="brain.h5ad")  # doctest: +SKIP
    """
    return _read(path, "mouse_brain")


def mouse_pancreas(path: str | os.PathLike[str] | None = None) -> AnnData:
    """Cells of the mouse pancreas at embryonic day 15.5, from ductal to endocrine cells.

    The dataset of Bastidas-Ponce et al. [1]_ as scVelo hosts it; its cell types form a continuum. The first call
    downloads 50 MB. If the data folder or the mirror has only `mouse_pancreas_bastidasponce_739.h5ad`, its 739 cells
    and 7,192 genes are read.

    Parameters
    ----------
    path
        A copy of the file, read without a checksum. None: the file in the data folder, or the public one, see
        :doc:`/datasets`.

    Returns
    -------
    AnnData
        3,696 cells × 27,998 mouse genes, spliced counts (CSR, float32). `obs["cell_type"]`: eight cell types.

    Raises
    ------
    ConnectionError
        If the download fails.
    ValueError
        If the file is not the published one, or `path` has no column of cell types.

    References
    ----------
    .. [1] Bastidas-Ponce et al., Comprehensive single cell mRNA profiling reveals a detailed roadmap for pancreatic
       endocrinogenesis, Development 146, dev173849, 2019 (GSE132188).

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.mouse_pancreas()  # doctest: +SKIP
    """
    adata = _read(path, "mouse_pancreas")
    if "cell_type" in adata.obs:  # the subset
        return adata
    if "clusters" not in adata.obs or "spliced" not in adata.layers:
        raise ValueError(
            'The file has no obs["clusters"] or layers["spliced"], as the published one. Read a dataset of your own '
            "with anndata.read_h5ad."
        )
    x = csr_matrix(adata.layers["spliced"], dtype=np.float32)
    return AnnData(x, obs=pd.DataFrame({"cell_type": adata.obs["clusters"]}), var=adata.var[[]])


def _read(path: str | os.PathLike[str] | None, name: str, *, download: bool = False, instead: str = "") -> AnnData:
    """Read a copy, or the published file; the counts become X, in CSR."""
    file = published_file(name, download=download, instead=instead) if path is None else path
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OldFormatWarning)  # some of scverse's files are older than anndata 0.7
        adata = read_h5ad(file)
    counts = adata.layers.pop("counts") if "counts" in adata.layers else adata.X
    adata.X = csr_matrix(counts, dtype=np.float32)
    return adata


def _counts_of_logs(x: csr_matrix, totals: np.ndarray) -> csr_matrix:
    """Recover counts from log1p of counts per 10,000: a cell's smallest value is one count, or several by its total."""
    values = np.expm1(x.data.astype(np.float64))
    unit = np.minimum.reduceat(values, x.indptr[:-1])  # each cell has a count
    unit /= np.maximum(np.rint(totals * unit / 1e4), 1)
    counts = np.rint(values / np.repeat(unit, np.diff(x.indptr)))
    return csr_matrix((counts.astype(np.float32), x.indices, x.indptr), shape=x.shape)


def _label(adata: AnnData, columns: tuple[str, ...], label: Callable[[str], str], keep: str | None = None) -> AnnData:
    """Write `obs["perturbation"]` from the first of these columns that exists; keep the column itself as `keep`."""
    column = next((one for one in columns if one in adata.obs), None)
    if column is None:
        raise ValueError(
            f"obs has none of the columns {', '.join(columns)}; it has {', '.join(map(str, adata.obs.columns))}. "
            'Read the file with anndata.read_h5ad and write obs["perturbation"] yourself: "control", "A" or "A+B".'
        )
    texts = adata.obs[column].astype(object).where(adata.obs[column].notna(), "").astype(str)
    names = {text: label(text) if text.lower() not in _MISSING else None for text in texts.unique()}
    if keep is not None:
        adata.obs[keep] = texts.where(~texts.str.lower().isin(_MISSING)).astype("category")
    adata.obs["perturbation"] = pd.Categorical(texts.map(names))
    return adata


def _norman_label(text: str) -> str:
    """Turn `"A+B"`, or guides such as `"A_NegCtrl0__A_NegCtrl0"`, into the targeted genes."""
    return _joined(re.split(r"[+_]", text.split("__")[0]))


def _adamson_label(text: str) -> str:
    """Turn a guide such as `"SPI1_pDS255"` into its gene; several genes of a guide are a combination."""
    if _ADAMSON_CONTROL.match(text):
        return "control"
    genes = re.sub(r"(_only)?(_p[A-Z]{2}\d+(-\d+)?)?$", "", text)
    return _joined(re.split(r"[+_]", genes))


def _joined(parts: list[str]) -> str:
    return "+".join(sorted({part for part in parts if part and not _CONTROL.fullmatch(part)})) or "control"


def _kang_label(text: str) -> str:
    names = {"ctrl": "control", "control": "control", "stim": "IFN-beta", "stimulated": "IFN-beta"}
    return names.get(text.lower(), text)
