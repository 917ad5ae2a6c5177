"""`tl.embed` and `tl.gene_embedding`: cell states and gene vectors of a trained model; nothing is fitted."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING, Literal

import numpy as np

from scdiva import _constants as C
from scdiva._checks import check_arguments
from scdiva._docs import with_shared_docs
from scdiva._settings import logger
from scdiva.data.genes import input_options, tokens_of_var
from scdiva.data.results import check_key, check_writable, write
from scdiva.models.inference import embed_all, embedding_key, model_name, open_cells_for_model, resolve_run_config

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
    empty: Literal["error", "nan"] = "error",
    batch_size: int | None = None,
    device: str | None = None,
    precision: Literal["auto", "fp32", "bf16"] | None = None,
    key_added: str | None = None,
    copy: bool = False,
) -> AnnData | None:
    """Embed cells zero-shot: the cell state (latent anchor) of a trained model.

    Genes are matched to the model's vocabulary by name (:func:`scdiva.pp.match_genes`), and cells are serialised with
    the entropies of the model's training corpus (paper, section 3.2). Cells are read by blocks of rows, so backed,
    zarr and dask data are never loaded whole. Nothing is fitted: the embedding of a cell does not depend on other cells
    or on the order of rows or columns. If the cell state comes from the set encoder, as in `"scdiva-mini"`, the
    transformer is not run.

    Parameters
    ----------
    adata
        Cells × genes, raw counts or log-normalised expression.
    model
        A loaded model, a model folder, the name of a bundled model, or `"hf://owner/name"`.
    %(reading)s
    empty
        Cells without any gene of the vocabulary: raise an error, or write rows of NaN (`"nan"`).
    batch_size
        Maximum number of cells per forward pass. None: `scdiva.settings.batch_size`. It changes speed and memory;
        results change by rounding at most. On a CPU the transformer runs cells one by one, in
        `scdiva.settings.threads` threads.
    device
        Torch device such as `"cpu"` or `"cuda:0"`. None: `scdiva.settings.device`.
    precision
        Arithmetic of the transformer: `"fp32"`, `"bf16"` or `"auto"` (bf16 if the device supports it in hardware).
        None: `scdiva.settings.precision`.
    key_added
        Key of `adata.obsm` to write. None: `"X_scdiva"`, or `"X_scdiva_integrated"` for a model from
        :func:`integrate`.
    copy
        Return a copy of `adata` with the embedding instead of writing into it.

    Returns
    -------
    `None`, or the copy if `copy=True`. Written are

    `adata.obsm[key_added]`
        float32 array of shape `(n_cells, state_dim)`, wider for a model of :func:`integrate`.
    `adata.uns["scdiva"][key_added]`
        Parameters of the call, and the shares of genes and counts that are in the model's vocabulary.

    Raises
    ------
    ValueError
        If the matrix is not counts or log-normalised expression (NaN, negative, scaled); if less than half of the
        counts belong to genes of the model, or a cell has none of them and `empty="error"`; if `adata` is backed and
        would have to be copied, or its `uns["scdiva"]` was not written by scdiva; if `key_added` is not a valid h5ad or
        zarr key or would overwrite an entry that scdiva did not write; or if the device does not exist or does not
        support the precision.
    KeyError
        If `layer` or the column of gene names does not exist.
    TypeError
        If `adata` is not an AnnData object.

    Warns
    -----
    UserWarning
        If the data have less than 65% of the model's genes, weighted by entropy, so that embeddings have a mean cosine
        below 0.95 to embeddings from all genes; or if values look unlike the unit that they are read as.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.pbmc3k_small()
    >>> sd.tl.embed(adata)
    >>> adata.obsm["X_scdiva"].shape
    (713, 192)
    """
    check_writable(adata, copy=copy)  # before the model is loaded
    if key_added is not None:
        check_key(key_added, "key_added")
    run_config = resolve_run_config(batch_size, device, precision)
    reading = input_options(adata, layer, use_raw, input, empty)

    from scdiva.models.pretrained import load_for

    loaded = load_for(model, run_config.device)
    key = embedding_key(loaded) if key_added is None else key_added
    # a model from tl.integrate may overwrite the embedding that tl.integrate wrote
    call = "tl.embed" if embedding_key(loaded) == C.OBSM_EMBEDDING else "tl.integrate"
    check_writable(adata, copy=copy, call=call, entry=key, obsm=[key])
    _, cells, parameters = open_cells_for_model(loaded, adata, run_config, reading)
    embedding = embed_all(loaded, cells, run_config)
    if n_empty := int(np.isnan(embedding[:, 0]).sum()):
        logger.info("%d cells have no known gene; their rows are NaN", n_empty)
    parameters["model"] = model_name(model)
    return write(adata, call, key, parameters, copy=copy, obsm={key: embedding})


@check_arguments
@with_shared_docs
def gene_embedding(
    adata: AnnData,
    model: ScDiVa | str | PathLike[str] = C.DEFAULT_MODEL,
    *,
    layer: str | None = None,
    use_raw: bool = False,
    input: Literal["auto", "counts", "lognorm"] = "auto",
    key_added: str = C.VARM_EMBEDDING,
    copy: bool = False,
) -> AnnData | None:
    r"""Embed genes by the gene embedding table of a trained model, which is the same for all data.

    Genes are matched to the model's vocabulary by name; columns of one gene get the same embedding.

    Parameters
    ----------
    adata
        Cells × genes, raw counts or log-normalised expression, read once to check the gene names, weighted by counts.
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
        float32 `(n_genes, dim)`; NaN for a gene that is not in the vocabulary or was not in the training corpus.
    `adata.uns["scdiva"][f"{key_added}_genes"]`
        Parameters of the call, and the shares of genes and counts that are in the model's vocabulary.

    :func:`scdiva.get.gene_embedding_df` returns it as a data frame.

    Raises
    ------
    KeyError
        If `layer` or the column of gene names does not exist.
    ValueError
        If `adata.raw.var_names` are not unique with `use_raw`, and as :func:`embed`.
    TypeError
        If `adata` is not an AnnData object.

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
    reading = input_options(adata, layer, use_raw, input)
    loaded, source, parameters = open_cells_for_model(model, adata, resolve_run_config(None, None, None), reading)
    del parameters["precision"]  # nothing is run
    tokens, table = tokens_of_var(adata, source.tokens, use_raw), loaded.embedding.gene.weight.detach()
    # rows of genes outside the training corpus still have random initial values
    has_embedding = (tokens != C.UNKNOWN) & loaded.seen_tokens[tokens]
    embedding = np.full((len(tokens), table.shape[1]), np.nan, dtype=np.float32)
    embedding[has_embedding] = table.float().cpu().numpy()[tokens[has_embedding]]
    return write(adata, "tl.gene_embedding", entry, parameters, copy=copy, varm={key_added: embedding})
