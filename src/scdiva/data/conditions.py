"""What the labels of perturbed cells name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from scdiva._labels import Kind, check_labels
from scdiva._nearest import nearest, no_column

if TYPE_CHECKING:
    from anndata import AnnData
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Perturbations:
    """The labels of cells.

    Attributes
    ----------
    parts
        Parts of each perturbation, in the order of their names; none for the control, which is number 0 and always
        there. Perturbations come in the order of their parts, singles first.
    labels
        What the data call each, of several names the first in the order of the alphabet.
    code
        Number of each cell's perturbation, int64 `(n_obs,)`.
    guides
        Of labels that name guides, what they are with genes instead.
    """

    parts: tuple[tuple[str, ...], ...]
    labels: tuple[str, ...]
    code: NDArray[np.int64]
    guides: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_control(self) -> NDArray[np.bool_]:
        """Which cells are controls."""
        found: NDArray[np.bool_] = self.code == 0
        return found

    def n_seen(self, code: int, single: set[str]) -> int:
        """Count the parts of a perturbation that occur in a set of single perturbations."""
        return sum(part in single for part in self.parts[code])

    def singles(self, among: NDArray[np.bool_]) -> set[str]:
        """Name the single perturbations that some cells have."""
        return {self.parts[code][0] for code in np.unique(self.code[among]) if len(self.parts[code]) == 1}


def perturbation_parts(label: str, control: str = "control", separator: str = "+") -> tuple[str, ...]:
    """Split the label of a perturbation into its parts.

    `"B+A"` is `"A+B"`; a part that is the control, as in `"A+control"`, is none; neither is one that is named twice.

    Parameters
    ----------
    label
        The label.
    control
        That of the control cells.
    separator
        What stands between the parts of a combination; empty: there are no combinations.

    Returns
    -------
    The parts in the order of their names, none for the control.

    Raises
    ------
    ValueError
        If a part is empty.
    """
    if label == control:
        return ()
    parts = [part.strip() for part in label.split(separator)] if separator else [label]
    if not all(parts):
        raise ValueError(
            f"{label!r} has an empty part. If {separator!r} does not join the parts of combinations here, pass another "
            "separator."
        )
    return tuple(sorted(set(parts) - {control}))


def perturbations(
    adata: AnnData,
    perturbation_key: str,
    control: str = "control",
    separator: str = "+",
    guides: Callable[[list[str]], Mapping[str, str]] | None = None,
    *,
    where: str = "adata",
) -> Perturbations:
    """Read the perturbation of each cell.

    Parameters
    ----------
    adata
        The cells.
    perturbation_key
        A column of `adata.obs`.
    control, separator
        See :func:`perturbation_parts`.
    guides
        Given the labels that occur, says of those that name guides what they are with genes instead
        (:func:`scdiva.data.guides.read_guides`).
    where
        What the cells are called in messages.

    Returns
    -------
    The perturbations; labels with the same parts are one.

    Raises
    ------
    KeyError
        If there is no such column.
    ValueError
        If a label is missing or has an empty part, or no cell is a control.
    """
    labels = column(adata, perturbation_key, where=where, kind="perturbation", meant=(control,))
    names, number = np.unique(labels, return_inverse=True)
    genes = {} if guides is None else guides(names.tolist())
    if genes:
        names, again = np.unique([genes.get(name, name) for name in names.tolist()], return_inverse=True)
        number = again[number]
    split = [perturbation_parts(str(name), control, separator) for name in names]
    if () not in split:
        shown = ", ".join(repr(str(name)) for name in names[:10])
        near = nearest(control, names, n=1)
        raise ValueError(
            f"no cell of {where} is a control: {where}.obs[{perturbation_key!r}] never is {control!r}; it holds "
            f"{shown}{', ...' if len(names) > 10 else ''}. Name the label of the unperturbed cells with control="
            + (f", perhaps control={near[0]!r}." if near else ".")
        )
    known = sorted(set(split), key=lambda parts: (len(parts) > 1, parts) if parts else (False, ()))
    code = {parts: i for i, parts in enumerate(known)}
    called = {parts: str(name) for parts, name in zip(reversed(split), reversed(names), strict=True)}
    chosen = tuple(called[parts] for parts in known)
    codes = np.array([code[parts] for parts in split], dtype=np.int64)
    return Perturbations(tuple(known), chosen, codes[number], genes)


def column(
    adata: AnnData, key: str, *, where: str = "adata", kind: Kind = "group", meant: Collection[str] = ()
) -> NDArray[np.str_]:
    """Read a column of labels as text.

    Parameters
    ----------
    adata
        The cells.
    key
        A column of `adata.obs`.
    where
        What the cells are called in messages.
    kind, meant
        As for :func:`scdiva._labels.check_labels`.

    Raises
    ------
    KeyError
        If there is no such column.
    ValueError
        If a label is missing, there is no cell, or the column holds no labels.
    """
    if key not in adata.obs:
        raise no_column(f"{where}.obs", key, adata.obs.columns)
    if not adata.n_obs:
        raise ValueError(f"{where} is empty: 0 cells × {adata.n_vars} genes.")
    missing = adata.obs[key].isna().to_numpy()
    if missing.any():
        raise ValueError(
            f"{where}.obs[{key!r}] is missing for {missing.sum()} of {adata.n_obs} cells, the first is "
            f"{adata.obs_names[missing.argmax()]!r}: leave them out with "
            f"{where}[{where}.obs[{key!r}].notna()].copy(), or name what they are."
        )
    check_labels(adata.obs[key], f"{where}.obs[{key!r}]", kind, meant=meant, stacklevel=4)
    found: NDArray[np.str_] = adata.obs[key].astype(str).to_numpy().astype(str)
    return found


def doses(adata: AnnData, key: str, *, where: str = "adata") -> NDArray[np.float64]:
    """Read a column of doses, NaN where there is no number.

    Parameters
    ----------
    adata, key, where
        As for :func:`column`.

    Raises
    ------
    KeyError
        If there is no such column.
    """
    if key not in adata.obs:
        raise no_column(f"{where}.obs", key, adata.obs.columns)
    found: NDArray[np.float64] = pd.to_numeric(adata.obs[key].astype(object), errors="coerce").to_numpy(np.float64)
    return found
