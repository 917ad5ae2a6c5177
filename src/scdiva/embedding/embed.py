"""`tl.embed` and `tl.gene_embedding`: cell states and gene vectors of a trained model; nothing is fitted."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING, Literal

import numpy as np

from scdiva import _constants as C
from scdiva._checks import check_arguments
from scdiva._docs import with_shared_docs
from scdiva._running import embed_all, embedding_key, how_to_run, model_name, open_for
from scdiva._settings import logger
from scdiva.data.genes import tokens_of_var
from scdiva.data.options import InputOptions, Species
from scdiva.data.results import check_key, check_writable, write

if TYPE_CHECKING:
    from anndata import AnnData

    from scdiva.models import ScDiVa


@check_arguments
@with_shared_docs
def embed(
    adata: AnnData,
    model: ScDiVa | str | PathLike[str] = C.DEFAULT_MODEL,
    *,
    layer: str | None = None,
    use_raw: bool = False,
    input: Literal["auto", "counts", "lognorm"] = "auto",
    gene_ids: str | None = None,
    species: Species = None,
    duplicates: Literal["sum", "error"] = "sum",
    empty: Literal["error", "nan"] = "error",
    batch_size: int | None = None,
    device: str | None = None,
    precision: Literal["auto", "fp32", "bf16"] | None = None,
    key_added: str | None = None,
    copy: bool = False,
) -> AnnData | None:
    """Embed cells zero-shot, by the cell state of a trained model, its latent anchor.

    Genes are matched to the model's vocabulary by name, cells are serialised with the entropies of the model's own
    corpus (paper, section 3.2) and read by row blocks, so backed, zarr and dask data are never loaded whole. Nothing
    is fitted: the embedding of a cell depends neither on the other cells nor on the order of rows or columns. A model
    whose state comes from the set encoder alone, as that of `"scdiva-mini"` does, needs no transformer for it.

    Parameters
    ----------
    adata
        Cells × genes, raw counts or log-normalised expression.
    model
        A loaded model, a model folder, the name of a bundled model, or `"hf://owner/name"`.
    %(reading)s
    empty
        A cell without any gene of the vocabulary is an error, or gets a row of NaN (`"nan"`).
    batch_size
        Most cells per forward pass; `None` takes `scdiva.settings.batch_size`. It changes speed and memory, and
        results by rounding at most. A CPU takes cells through a transformer one by one,
        `scdiva.settings.threads` at once.
    device
        Torch device such as `"cpu"` or `"cuda:0"`; `None` takes `scdiva.settings.device`.
    precision
        Arithmetic of the transformer: `"fp32"`, `"bf16"` or `"auto"`, bf16 where the device has it in hardware;
        `None` takes `scdiva.settings.precision`.
    key_added
        Key of `adata.obsm` to write. None: `"X_scdiva"`, or of a model of `tl.integrate` `"X_scdiva_integrated"`.
    copy
        Return a copy of `adata` with the embedding instead of writing into it.

    Returns
    -------
    `None`, or the copy if `copy=True`. Written are

    `adata.obsm[key_added]`
        float32 array of shape `(n_cells, state_dim)`, wider for a model of :func:`integrate`.
    `adata.uns["scdiva"][key_added]`
        The parameters of the call, and the share of genes and counts that the model's vocabulary holds.

    Raises
    ------
    ValueError
        If the matrix is not counts or log-normalised expression (NaN, negative, scaled), if less than half of the
        counts belong to genes that the model knows, or a cell has none of them and `empty="error"`; if `adata` is
        backed and would have to be copied, or its `uns["scdiva"]` is not ours; if `key_added` is none for a file, or
        something that scdiva did not write stands there; or if the device is not there or cannot do
        the precision asked for.
    KeyError
        If `layer` or `gene_ids` does not exist.
    TypeError
        If `adata` is no AnnData object.

    Warns
    -----
    UserWarning
        If the data have so few of the model's genes (less than 65% by entropy) that the mean cosine of embeddings to
        those of whole cells is below 0.95; if values are taken as counts or logarithms although they look unlike.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.pbmc3k_small()
    >>> sd.tl.embed(adata)
    >>> adata.obsm["X_scdiva"].shape
    (713, 192)
    """
    check_writable(adata, copy=copy)
    check_key(C.OBSM_EMBEDDING if key_added is None else key_added, "key_added")
    running = how_to_run(batch_size, device, precision)
    reading = InputOptions(layer, use_raw, input, gene_ids, species, duplicates, empty)

    from scdiva.models.pretrained import load_for

    loaded = load_for(model, running.device)
    key = embedding_key(loaded) if key_added is None else key_added
    # the model that tl.integrate returned may embed the cells again that it was fitted to
    call = "tl.embed" if embedding_key(loaded) == C.OBSM_EMBEDDING else "tl.integrate"
    check_writable(adata, copy=copy, call=call, entry=key, obsm=[key])
    _, cells, parameters = open_for(loaded, adata, running, reading)
    embedding = embed_all(loaded, cells, running)
    if left_out := int(np.isnan(embedding[:, 0]).sum()):
        logger.info("%d cells have no known gene; their rows are NaN", left_out)
    notes = {**parameters, "model": model_name(model)}
    return write(adata, call, key, notes, copy=copy, obsm={key: embedding})


@check_arguments
@with_shared_docs
def gene_embedding(
    adata: AnnData,
    model: ScDiVa | str | PathLike[str] = C.DEFAULT_MODEL,
    *,
    layer: str | None = None,
    use_raw: bool = False,
    input: Literal["auto", "counts", "lognorm"] = "auto",
    gene_ids: str | None = None,
    species: Species = None,
    duplicates: Literal["sum", "error"] = "sum",
    key_added: str = C.VARM_EMBEDDING,
    copy: bool = False,
) -> AnnData | None:
    r"""Embed genes: the model's own vectors of them, rows of its embedding table, the same for all data.

    Genes are matched to the model's vocabulary by name; columns of the same gene get the same embedding.

    Parameters
    ----------
    adata
        Cells × genes, raw counts or log-normalised expression. It is read once, since genes are weighed by their counts
        to recognise a wrong list of names; no cell is run.
    model
        A loaded model, a model folder, the name of a bundled model, or `"hf://owner/name"`.
    %(reading)s
    key_added
        Key of `adata.varm` to write.
    copy
        Return a copy of `adata` with the embedding instead of writing into it.

    Returns
    -------
    `None`, or the copy if `copy=True`. Written are

    `adata.varm[key_added]`
        float32 `(n_genes, dim)`. NaN for a gene that the vocabulary doesn't hold, or that the model's corpus never saw.
    `adata.uns["scdiva"][f"{key_added}_genes"]`
        The parameters of the call, and the share of genes and counts that the model's vocabulary holds.

    :func:`scdiva.get.gene_embedding_df` gives it as a data frame.

    Raises
    ------
    KeyError
        If `layer` or `gene_ids` does not exist.
    ValueError
        If `adata.raw.var_names` repeat names under `use_raw`, or for what :func:`embed` refuses.
    TypeError
        If `adata` is no AnnData object.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.toy(60, 100)
    >>> sd.tl.gene_embedding(adata)
    >>> adata.varm["X_scdiva"].shape
    (100, 128)
    """
    check_key(key_added, "key_added")
    entry = f"{key_added}_{C.GENES}"
    check_writable(adata, copy=copy, call="tl.gene_embedding", entry=entry, varm=[key_added])
    reading = InputOptions(layer, use_raw, input, gene_ids, species, duplicates)
    loaded, source, parameters = open_for(model, adata, how_to_run(None, None, None), reading)
    del parameters["precision"]  # nothing is computed
    tokens, table = tokens_of_var(adata, source.tokens, use_raw), loaded.embedding.gene.weight.detach()
    # a row that no corpus has touched is still the noise it started from
    known = (tokens != C.UNKNOWN) & loaded.seen_tokens[tokens]
    embedding = np.full((len(tokens), table.shape[1]), np.nan, dtype=np.float32)
    embedding[known] = table.float().cpu().numpy()[tokens[known]]
    return write(adata, "tl.gene_embedding", entry, parameters, copy=copy, varm={key_added: embedding})
