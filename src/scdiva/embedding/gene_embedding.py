"""Embed genes with a trained model."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING, Literal

import numpy as np

from scdiva import _constants as C
from scdiva._checks import check_arguments
from scdiva._docs import with_shared_docs
from scdiva._running import how_to_run, open_for
from scdiva.data.genes import tokens_of_var
from scdiva.data.options import InputOptions, Species
from scdiva.data.results import check_key, check_writable, write

if TYPE_CHECKING:
    from anndata import AnnData

    from scdiva.models import ScDiVa


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
