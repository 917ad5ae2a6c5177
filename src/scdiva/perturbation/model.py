"""A model fitted on a perturbation screen: what was measured, and what a network adds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scdiva._constants import BASELINES
from scdiva.models._fitted import Fitted, arrays, check_shapes, check_sizes, put_into, shapes
from scdiva.models._summary import table
from scdiva.models.inference import Packed
from scdiva.models.network import of_model
from scdiva.models.scdiva import ScDiVa
from scdiva.perturbation.baselines import baselines
from scdiva.perturbation.network import PerturbationHead, PerturbationSizes, change_of, treatments
from scdiva.perturbation.response import expected_response
from scdiva.perturbation.screen import KINDS, Conditions, Kind, Screen, kinds, numbered_labels, similarities_of

EXPECTED = "expected"
"""What the network is added to if it is no baseline: the expected response (:mod:`scdiva.perturbation.response`)."""
_MOST = {"n_genes": 1_000_000, "rank": 4096, "hidden": 65_536, "n_labels": 1_000_000}
"""Largest sizes that are believed of a file."""
COLUMNS = ("perturbation_key", "control", "groupby", "dose_key", "separator")
"""What is noted of the study design."""
_SCREEN = ("delta", "n_cells", "control", "n_control", "states", "variance", "level")


class Predicted(NamedTuple):
    """Mean change of expression, each `(n_targets, n_genes)`.

    Attributes
    ----------
    change
        Of what :attr:`PerturbationModel.base` names.
    sd
        Standard deviation of the expected response.
    baselines
        By name.
    base
        Name of what `change` is, for each target.
    measured
        bool, whether a target was measured, at whatever dose: the network adds nothing to it.
    """

    change: NDArray[np.float64]
    sd: NDArray[np.float64]
    baselines: dict[str, NDArray[np.float64]]
    base: list[str]
    measured: NDArray[np.bool_]


@dataclass(eq=False)
class PerturbationModel(Fitted):
    """What `tl.fit_perturbation` fits; `tl.predict_perturbation(adata, model=...)` predicts with it.

    Attributes
    ----------
    model
        The network that control cells are run through.
    screen
        What was measured.
    base
        What the network's part is added to, for each kind of condition: a baseline, or `"expected"`.
    head
        The network's part; None where it was not asked for or did not help.
    perturbation_key, control, groupby, dose_key, separator
        As they were given; `""` for none.
    notes
        What was found in fitting: `validation`, `history`, `strategy`, `seed`, `seconds`.
    """

    kind: ClassVar[str] = "perturbation_model"
    model: ScDiVa
    screen: Screen
    base: dict[Kind, str]
    head: PerturbationHead | None
    perturbation_key: str
    control: str
    groupby: str = ""
    dose_key: str = ""
    separator: str = "+"
    notes: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Say what it is in a line."""
        network = "no network" if self.head is None else "a network"
        return f"PerturbationModel({len(self.screen.conditions)} conditions, {len(self.screen.genes)} genes, {network})"

    def _repr_html_(self) -> str:
        screen = self.screen
        network = None if self.head is None else sum(p.numel() for p in self.head.parameters())
        rows: dict[str, object] = {
            "conditions": f"{len(screen.conditions)} of {len(screen.groups)} group(s) of cells",
            "genes": f"{len(screen.genes):,}",
            "trained on": f"{screen.n_cells.sum():,} perturbed and {screen.n_control.sum():,} control cells",
            "columns": ", ".join(filter(None, (self.perturbation_key, self.groupby, self.dose_key))),
            "control": self.control,
            "network": "none" if network is None else f"{network:,} parameters",
            "strategy": self.notes.get("strategy"),
            **of_model(self.model),
        }
        return table("PerturbationModel", rows)

    @property
    def labels(self) -> dict[str, int]:
        """Perturbations that are no genes of the vocabulary, numbered."""
        return numbered_labels(self.model, self.screen)

    def check_columns(
        self, perturbation_key: str | None, control: str, groupby: str | None, dose_key: str | None, separator: str
    ) -> None:
        """Refuse arguments of :func:`scdiva.tl.predict_perturbation` by which this model was not fitted.

        `"control"` and `"+"`, which stand there by default, count as not given.
        """
        given = {
            "perturbation_key": perturbation_key,
            "groupby": groupby,
            "dose_key": dose_key,
            "control": None if control == "control" else control,
            "separator": None if separator == "+" else separator,
        }
        for name, value in given.items():
            if value is not None and value != getattr(self, name):
                raise ValueError(
                    f"this model was fitted with {name}={getattr(self, name)!r}, not {value!r}: leave it out, or name "
                    "a model to fit one."
                )

    def mean_change(self, targets: Conditions, states: NDArray[np.float32]) -> Predicted:
        """Predict the mean change that the network's part is added to.

        Parameters
        ----------
        targets
            What to predict; groups from `len(screen.groups)` on are new.
        states
            `(n_new_groups, state_dim)`, mean states of the control cells of new groups.

        Raises
        ------
        ValueError
            If what the network is added to is not defined for a target.
        """
        screen = self.screen
        similarities = similarities_of(self.model, screen, targets, states)
        expected, sd = expected_response(screen, targets, similarities)
        simple = baselines(screen, targets)
        what = kinds(targets, screen.conditions)
        named = [self.base[kind] for kind in what]
        change = expected.copy()
        for row, name in enumerate(named):
            if name != EXPECTED:
                change[row] = simple[name][row]
            if np.isnan(change[row]).any():
                raise ValueError(
                    f"residual={name!r} is not defined for {self.separator.join(targets.parts[row])!r}, which was not "
                    'measured in another group: choose another, or residual="auto".'
                )
        return Predicted(change, sd, simple, named, np.array([kind == "measured" for kind in what], dtype=bool))

    @torch.no_grad()
    def added(self, cells: Packed, parts: Sequence[tuple[str, ...]], dose: NDArray[np.float64]) -> Tensor:
        """Predict what the network adds for control cells.

        Parameters
        ----------
        cells
            B complete control cells.
        parts, dose
            Perturbation of each.

        Returns
        -------
        float32 `(B, n_genes)` on the CPU; zero without a network.
        """
        if self.head is None:
            return torch.zeros(len(parts), len(self.screen.genes))
        return change_of(self.model, self.head, cells, *treatments(self.model, self.screen, parts, dose)).float().cpu()

    def _contents(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        c = self.screen.conditions
        settings = {
            "genes": list(self.screen.genes),
            "groups": list(self.screen.groups),
            "parts": [list(parts) for parts in c.parts],
            "labels": list(self.screen.labels),
            "base": self.base,
            "sizes": None if self.head is None else asdict(self.head.sizes),
            "given": {name: getattr(self, name) for name in COLUMNS},
            "notes": self.notes,
        }
        tensors = {name: torch.from_numpy(getattr(self.screen, name)) for name in _SCREEN}
        tensors |= {"group": torch.from_numpy(c.group), "dose": torch.from_numpy(c.dose)}
        if self.head is not None:
            tensors |= {f"head.{name}": value for name, value in self.head.state_dict().items()}
        return settings, tensors

    @classmethod
    def _restored(cls, model: ScDiVa, settings: dict[str, Any], tensors: dict[str, Tensor]) -> Self:
        genes, groups = tuple(map(str, settings["genes"])), tuple(map(str, settings["groups"]))
        parts = tuple(tuple(map(str, names)) for names in settings["parts"])
        labels = tuple(map(str, settings["labels"]))
        base = {kind: str(settings["base"][kind]) for kind in (*KINDS, "measured")}
        if not set(base.values()) <= {*BASELINES, EXPECTED}:
            raise ValueError(f"base {sorted(set(base.values()))}")
        sizes = None if settings["sizes"] is None else PerturbationSizes(**settings["sizes"])
        if not genes or not groups or not all(parts) or len(labels) != len(parts):
            raise ValueError("genes, groups or parts out of range")
        given = {name: str(settings["given"][name]) for name in COLUMNS}
        notes = arrays(dict(settings["notes"]))
        c, n, g = model.config, len(parts), len(genes)
        expected: dict[str, tuple[int, ...]] = {
            "delta": (n, g),
            "n_cells": (n,),
            "control": (len(groups), g),
            "n_control": (len(groups),),
            "states": (len(groups), c.state_dim),
            "variance": (g,),
            "level": (g,),
            "group": (n,),
            "dose": (n,),
        }
        head = None
        if sizes is not None:
            check_sizes(sizes, _MOST)
            if (sizes.dim, sizes.state_dim, sizes.n_genes) != (c.dim, c.state_dim, g):
                raise ValueError("its head is for another model than the one beside it")
            with torch.device("meta"):  # nothing of the sizes that a file names is set aside before they prove true
                head = PerturbationHead(sizes)
            expected |= shapes(head, "head.")
        check_shapes(tensors, expected)
        if head is not None:
            put_into(head, tensors, "head.")
            head.to(next(model.parameters()).device)
        group, dose = tensors["group"].numpy(), tensors["dose"].numpy()
        if n and not (group.dtype == np.int64 and group.min() >= 0 and group.max() < len(groups)):
            raise ValueError("it names a group that is not there")
        low = [tensors["n_cells"] < 1, tensors["n_control"] < 1, tensors["dose"] <= 0, tensors["variance"] < 0]
        if any(bool(part.any()) for part in low):
            raise ValueError("it holds numbers of cells, doses or variances that are out of range")
        conditions = Conditions(parts, group, dose)
        screen = Screen(genes, groups, conditions, labels, **{name: tensors[name].numpy() for name in _SCREEN})
        if sizes is not None and sizes.n_labels != len(numbered_labels(model, screen)):
            raise ValueError(f"its head is of {sizes.n_labels} labels, which its screen does not have")
        return cls(model, screen, base, head, **given, notes=notes)
