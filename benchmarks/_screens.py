"""Perturbation screens as perturbation.py takes them: counts, perturbations and groups, and how each is split."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import anndata as ad
import numpy as np
import pandas as pd
import scipy.sparse as sp

import scdiva as sd
from scdiva.data.conditions import Naming

CONDITION, GROUP = "condition", "group"
"""Columns of obs of the prepared cells."""
ALL = "all"
"""The group of all cells where there is no column of groups."""
LEAST_CELLS = 20
MAX_CELLS = 500
"""Of a perturbation in a group."""
Split = str
"""`single`, `combination` or `group`, as `pp.split_perturbations` has it."""


class Screen(NamedTuple):
    """A file, how it is split, its column and name of controls, that of groups if any, and the cells to keep.

    `reader` names the function of `scdiva.datasets` that reads the file and writes its labels.
    """

    file: str
    by: Split
    key: str = "perturbation"
    control: str = "control"
    groupby: str | None = None
    keep: dict[str, list[str]] | None = None
    separator: str = "+"
    reader: str = ""


DEVEL = "perturbench_devel_norman_mcfaline_5961_500g"
SCREENS = {
    "norman_doubles": Screen(DEVEL, "combination", keep={"cell_type": ["k562"]}),
    "norman_singles": Screen(DEVEL, "single", keep={"cell_type": ["k562"]}),
    "glioma": Screen(DEVEL, "group", groupby="cell_type", keep={"cell_type": ["A172", "T98G", "U87MG"]}),
    "kang_ifnb": Screen("kang_ifnb_2800", "group", groupby="cell_type"),
    "norman_2019_doubles": Screen("norman_2019_raw", "combination", reader="norman"),
    "norman_2019_singles": Screen("norman_2019_raw", "single", reader="norman"),
    "adamson_2016": Screen("adamson_2016_upr_perturb_seq", "single", reader="adamson"),
    "kang_2018": Screen("kang_2018", "group", groupby="cell_type", reader="kang"),
}


def read_screen(folder: Path, screen: Screen) -> ad.AnnData:
    """Read the file of a screen, by its reader where it has one."""
    file = folder / f"{screen.file}.h5ad"
    adata: ad.AnnData = getattr(sd.datasets, screen.reader)(file) if screen.reader else ad.read_h5ad(file)
    return adata


def prepared(adata: ad.AnnData, screen: Screen, layer: str | None = None, max_cells: int = MAX_CELLS) -> ad.AnnData:
    """Counts with `CONDITION`, its parts in the order of their names, and `GROUP`, nothing else; always the same cells.

    Left out are cells without a perturbation or group, perturbations of fewer than 20 cells in a group, groups of
    fewer than 20 control cells or with nothing but controls; of the rest at most `max_cells` of each perturbation in a
    group stay (0: all).

    Raises
    ------
    ValueError
        If a column is missing, values are negative, or no perturbation is left.
    """
    need_columns(adata, screen.key, *([screen.groupby] if screen.groupby else []), *(screen.keep or {}))
    kept = np.ones(adata.n_obs, dtype=bool)
    for key, values in (screen.keep or {}).items():
        kept &= adata.obs[key].astype(str).isin(values).to_numpy()
    group = adata.obs[screen.groupby] if screen.groupby else pd.Series(ALL, index=adata.obs_names)
    kept &= adata.obs[screen.key].notna().to_numpy() & group.notna().to_numpy()
    naming = Naming((screen.control,), screen.separator)
    named = {
        label: screen.separator.join(naming.parts(label)) or screen.control
        for label in adata.obs.loc[kept, screen.key].astype(str).unique()
    }
    obs = pd.DataFrame({CONDITION: adata.obs[screen.key].astype(str).map(named), GROUP: group.astype(str)})
    rows = _drawn(obs.reset_index(drop=True)[kept], screen.control, max_cells)
    counts = sp.csr_matrix(adata.X if layer is None else adata.layers[layer], dtype=np.float32)[rows]
    if (counts.data < 0).any():
        raise ValueError("counts are needed, but there are negative values: name the layer of counts with --layer.")
    return ad.AnnData(counts, obs=obs.iloc[rows].astype("category"), var=adata.var[[]].copy())


def need_columns(adata: ad.AnnData, *keys: str) -> None:
    """Refuse a file without these columns."""
    for key in keys:
        if key not in adata.obs:
            raise ValueError(f"obs has no column {key!r}; it has {', '.join(map(repr, adata.obs.columns))}.")


def _drawn(obs: pd.DataFrame, control: str, max_cells: int) -> np.ndarray:
    """The rows that stay, in order; the index of `obs` are rows of the file."""
    sizes = obs.groupby([GROUP, CONDITION], observed=True).size()
    enough = sizes[sizes >= LEAST_CELLS].reset_index()
    groups = set(enough.loc[enough[CONDITION] == control, GROUP]) & set(enough.loc[enough[CONDITION] != control, GROUP])
    places = [place for place in enough[[GROUP, CONDITION]].itertuples(index=False) if place[0] in groups]
    if not places:
        raise ValueError(
            f"no group has {LEAST_CELLS} cells of {control!r} and {LEAST_CELLS} of a perturbation: the largest "
            f"numbers of cells are {sizes.nlargest(3).to_dict()}."
        )
    by_place = obs.groupby([GROUP, CONDITION], observed=True).indices
    rng = np.random.default_rng(0)
    found = [obs.index.to_numpy()[rng.permutation(by_place[tuple(place)])[: max_cells or None]] for place in places]
    return np.sort(np.concatenate(found))


def n_folds(adata: ad.AnnData, by: Split, n_splits: int) -> int:
    """How many folds a split has: of groups, one for each."""
    return adata.obs[GROUP].nunique() if by == "group" else n_splits
