"""Match the genes of a data set with the genes that a model knows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from scdiva._constants import MATCH, UNS, VAR_TOKEN
from scdiva._docs import with_shared_docs
from scdiva.data.cells import open_cells
from scdiva.data.genes import tokens_of_var
from scdiva.data.reading import Duplicates, Reading, Species
from scdiva.data.writing import check_writable, noted
from scdiva.tokenizer.vocabulary import Vocabulary

if TYPE_CHECKING:
    from anndata import AnnData


@with_shared_docs
def match_genes(
    adata: AnnData,
    vocabulary: Vocabulary | str | Path = "human",
    *,
    gene_ids: str | None = None,
    species: Species = None,
    duplicates: Duplicates = "sum",
    layer: str | None = None,
    use_raw: bool = False,
    copy: bool = False,
) -> AnnData | None:
    """Match gene names with a vocabulary and report how much of the data it covers.

    Names may be current symbols, previous symbols, aliases, Ensembl ids (with or without version), or a mixture: see
    :meth:`scdiva.tokenizer.Vocabulary.match`. The matrix is read once, to weigh genes by their counts and to refuse
    what is neither counts nor log-normalised. Other calls match genes themselves: this one is for looking.

    Parameters
    ----------
    adata
        Cells by genes, counts or log-normalised values (which are weighed on the count scale).
    vocabulary
        A vocabulary, "human", the name of a bundled model, the folder of a saved model, or the file of a vocabulary.
    %(gene_ids)s
    %(species)s
    %(duplicates)s
    %(layer)s
    %(use_raw)s
    copy
        Write into a copy and return it.

    Returns
    -------
    None, or the copy. Written are

    `adata.var["scdiva_token"]`
        int32 token of each gene, -1 where the vocabulary does not hold it.
    `adata.uns["scdiva"]["match"]`
        `n_genes`, `n_mapped`, `share_genes`, `share_counts`, `n_duplicates`, `vocabulary` (its fingerprint), `how`
        (names found as "ensembl", "symbol", "previous", "alias", "ortholog", "unknown"), and the arguments under
        `params`.

    Raises
    ------
    ValueError
        If less than half of the counts fall on known genes; if `duplicates="error"` and two columns mean one gene; if
        the matrix is absent, empty, scaled, or holds NaN, infinite or negative values.
    KeyError
        If there is no such column or layer.

    Warns
    -----
    UserWarning
        If less than 80% of the counts fall on known genes; if genes are read as their human orthologs.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.toy()
    >>> sd.pp.match_genes(adata)
    >>> adata.uns["scdiva"]["match"]["share_counts"]
    1.0
    """
    check_writable(adata, copy=copy, call="pp.match_genes", entry=MATCH, var=[VAR_TOKEN])
    reading = Reading(layer, use_raw, "auto", gene_ids, species, duplicates, empty="nan")
    cells = open_cells(adata, vocabulary, reading, ranked=False, keep=False)
    tokens = tokens_of_var(adata, cells.tokens, use_raw)
    report = dict(cells.report)
    report["params"] = {
        "vocabulary": str(vocabulary) if isinstance(vocabulary, str | Path) else "given",
        **{name: value for name, value in reading.parameters().items() if name != "input"},
    }

    target = adata.copy() if copy else adata
    target.var[VAR_TOKEN] = tokens
    target.uns[UNS] = noted(target, "pp.match_genes", MATCH, report, var=[VAR_TOKEN])
    return target if copy else None
