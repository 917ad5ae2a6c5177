"""`tl.rank_perturbations`: which perturbation would bring one kind of cell nearest to another."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING, Literal

import numpy as np
import pandas as pd

from scdiva._constants import RANKED, UNS
from scdiva._docs import with_shared_docs
from scdiva._progress import progress_bar
from scdiva._settings import settings
from scdiva.data.cells import log_normalised
from scdiva.data.conditions import column, perturbation_parts
from scdiva.data.reading import Reading, Species
from scdiva.data.writing import check_writable, noted
from scdiva.tl._predicted import Asked, gene_columns, network_on
from scdiva.tl._screen import check_genes, read_controls, refuse_unknown

if TYPE_CHECKING:
    from anndata import AnnData

    from scdiva.models import PerturbationModel

NETWORK_CELLS = 32
"""Cells whose changes by the network are averaged."""


@with_shared_docs
def rank_perturbations(
    adata: AnnData,
    state_key: str,
    start: str,
    *,
    target: str,
    model: PerturbationModel | str | PathLike[str],
    candidates: Sequence[str] | str | None = None,
    combinations: bool = False,
    dose: float | None = None,
    key_added: str = RANKED,
    layer: str | None = None,
    use_raw: bool = False,
    input: Literal["auto", "counts", "lognorm"] = "auto",
    gene_ids: str | None = None,
    species: Species = None,
    duplicates: Literal["sum", "error"] = "sum",
    device: str | None = None,
) -> pd.DataFrame:
    """Rank perturbations by how near they would bring the cells of one group to those of another.

    The change that is needed is the difference of the two groups' mean expression; each candidate's change is predicted
    for the cells of `start` by a model fitted on a screen (:func:`fit_perturbation`), and held against it.

    Parameters
    ----------
    adata
        Cells × genes, with all genes of the screen; only `uns[key_added]` is written.
    state_key
        Column of `adata.obs` with the groups.
    start, target
        Group to start from, and the one to reach.
    model
        A fitted perturbation model, or its folder.
    candidates
        Perturbations to rank, such as `["KLF1", "KLF1+TGFBR2"]`; None: all that the screen measured.
    combinations
        Rank all pairs of the genes and labels that the screen measured alone, too.
    dose
        Dose of all; None: the median dose of the screen.
    key_added
        Key of `adata.uns` to write; an earlier ranking that stands there is replaced.
    %(reading)s
    device
        Torch device; None takes `scdiva.settings.device`.

    Returns
    -------
    One row a perturbation, best first: `perturbation`, `n_parts`, `n_seen` (parts that were measured alone), `trained`
    (whether it was measured, in any group), `cosine` of predicted and needed change, by which it is sorted, `reached`
    (length of the predicted change along the needed one, 1 = all of it), and `distance` that is left, as a share of
    that at the start. The columns are also written into `adata.uns[key_added]`, as arrays, with `state_key`, `start`
    and `target`; h5ad and zarr hold them.

    Raises
    ------
    KeyError
        If a column or layer does not exist.
    ValueError
        If a group does not exist or both are the same, the two have equal means, genes of the screen are missing, the
        start cells are of several groups of the screen, a candidate is not known or named twice, combinations are
        asked for without a separator, genes repeat a name, or the matrix is refused; if `adata.uns[key_added]` holds
        what scdiva did not write, or `adata` is a backed view.
    TypeError
        If `adata` is no AnnData object, or the model was not fitted on a screen.

    Examples
    --------
    >>> import scdiva as sd
    >>> screen = sd.datasets.toy(120, 100)
    >>> screen.obs["perturbation"] = ["control", "A", "B", "A+B", "C", "B+C"] * 20
    >>> screen.obs["state"] = ["now", "other", "wanted"] * 40
    >>> fitted = sd.tl.fit_perturbation(screen, "perturbation", strategy="none")
    >>> ranking = sd.tl.rank_perturbations(screen, "state", "now", target="wanted", model=fitted)
    >>> sorted(ranking.index) if ranking.index.dtype == object else len(ranking)
    5
    """
    from scdiva.models._fitted import load_fitted
    from scdiva.perturbation.model import PerturbationModel

    check_writable(adata, call="tl.rank_perturbations", uns=[key_added])
    if isinstance(model, str | PathLike):
        model = load_fitted(PerturbationModel, model, device)
    if not isinstance(model, PerturbationModel):
        raise TypeError(f"model must be what scdiva.tl.fit_perturbation returns, got {type(model).__name__}.")
    states = column(adata, state_key)
    for name in (start, target):
        if name not in states:
            there = ", ".join(map(repr, sorted(set(states.tolist()))[:10]))
            raise ValueError(f"adata.obs[{state_key!r}] never is {name!r}; there are {there}.")
    if start == target:
        raise ValueError(f"start and target are both {start!r}: there is no change to look for.")
    if dose is not None and np.ndim(dose):
        raise ValueError(f"dose must be one number for all, got {dose!r}.")
    if combinations and not model.separator:
        raise ValueError("combinations need a separator, and the screen was read without: separator='+'")
    reading = Reading(layer, use_raw, input, gene_ids, species, duplicates)
    chosen = states == start
    group = _group(adata, model, chosen)
    screen = model.screen
    if candidates is None:
        called = dict(zip(screen.conditions.parts, screen.labels, strict=True))
        candidates = [called[parts] for parts in sorted(called)]
    names = [candidates] if isinstance(candidates, str) else [str(name) for name in candidates]
    alone = {p[0] for p in screen.conditions.parts if len(p) == 1}
    if combinations:
        known = {perturbation_parts(name, model.control, model.separator) for name in names}
        names += [model.separator.join(pair) for pair in itertools.combinations(sorted(alone), 2) if pair not in known]
    asked = Asked.of(model, names, None, dose, called="candidates")
    refuse_unknown(asked.parts, screen, model.model)

    expression, var = log_normalised(adata, **reading.matrix())
    check_genes(var.index)
    places = gene_columns(var.index, screen.genes)
    from_, to = (np.asarray(expression[states == name].mean(axis=0)).ravel()[places] for name in (start, target))
    needed = to - from_
    length = float(np.linalg.norm(needed))
    if length < 1e-9:
        raise ValueError(f"{start!r} and {target!r} have the same mean expression: there is no change to look for.")
    where = settings.resolve_device(device)
    controls = read_controls(adata, chosen, np.full(adata.n_obs, group, dtype=object), model.model, where, reading)
    targets, fresh = asked.targets(model, [group], controls)
    found = model.mean_change(targets, fresh)
    change = found.change
    if model.head is not None:
        cells = controls.cells.take(np.arange(min(NETWORK_CELLS, len(controls.rows)))).packed
        n = len(cells[2]) - 1
        with network_on(model, where):
            for row in progress_bar(np.flatnonzero(~found.measured), desc="predicting", unit="condition"):
                added = model.added(cells, [targets.parts[row]] * n, np.full(n, targets.dose[row]))
                change[row] += added.mean(dim=0).numpy()
    along = change @ needed / length
    measured = set(screen.conditions.parts)
    frame = pd.DataFrame(
        {
            "perturbation": asked.names,
            "n_parts": targets.n_parts,
            "n_seen": [sum(part in alone for part in parts) for parts in targets.parts],
            "trained": [parts in measured for parts in targets.parts],
            "cosine": along / np.maximum(np.linalg.norm(change, axis=1), 1e-12),
            "reached": along / length,
            "distance": np.linalg.norm(needed - change, axis=1) / length,
        }
    )
    frame = frame.sort_values("cosine", ascending=False, kind="stable").reset_index(drop=True)
    columns = {str(name): np.asarray(frame[name]) for name in frame}
    columns["perturbation"] = np.array(frame["perturbation"].tolist(), dtype=object)
    adata.uns[key_added] = {**columns, "state_key": str(state_key), "start": str(start), "target": str(target)}
    adata.uns[UNS] = noted(adata, "tl.rank_perturbations", None, uns=[key_added])
    return frame


def _group(adata: AnnData, model: PerturbationModel, chosen: np.ndarray) -> str:
    """Return the group of the screen that the start cells are of."""
    if not model.groupby:
        return ""
    found = sorted(set(column(adata, model.groupby)[chosen].tolist()))
    if len(found) > 1:
        raise ValueError(
            f"the start cells are of {len(found)} groups of adata.obs[{model.groupby!r}], the first are "
            f"{', '.join(map(repr, found[:5]))}; perturbations change each in its own way: start from cells of one."
        )
    result: str = found[0]
    return result
