"""Model fitted on a perturbation screen: fitting, predicting mean changes, saving."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scdiva._constants import BASELINES, DEFAULT_MODEL, FINETUNED, N_SPECIAL
from scdiva._settings import logger, progress_bar, settings
from scdiva.data.genes import Species
from scdiva.models.pretrained import Fitted, arrays, check_shapes
from scdiva.models.scdiva import ScDiVa
from scdiva.perturbation.conditions import ScreenDesign, perturbations, read_perturbations
from scdiva.perturbation.response import (
    KINDS,
    METHODS,
    Kind,
    best_base,
    by_every_method,
    kinds,
    similarities_of,
    summary,
    validate,
)
from scdiva.perturbation.response_head import ResponseHead, predicted_change
from scdiva.perturbation.screen import (
    Conditions,
    Controls,
    OpenScreen,
    Screen,
    gene_tokens,
    group_names,
    group_states,
    read_screen,
)
from scdiva.train.config import FinetuneConfig

if TYPE_CHECKING:
    from anndata import AnnData

MAX_CONTROLS = 64
"""Maximum number of control cells over which the prediction of a fine-tuned model is averaged."""
_HEAD = "response."
"""Prefix of the response head's tensors in a model folder."""
_SCREEN = ("delta", "n_cells", "control", "n_control", "states", "variance", "level")


class Predicted(NamedTuple):
    """Predicted change of mean expression, each `(n_targets, n_genes)`.

    Attributes
    ----------
    change
        Prediction by the method in `base`.
    sd
        Standard deviation of the expected response.
    baselines
        Predictions of the baselines; for a fine-tuned model also of the expected response.
    base
        Method that predicts each target.
    """

    change: NDArray[np.float64]
    sd: NDArray[np.float64]
    baselines: dict[str, NDArray[np.float64]]
    base: list[str]


@dataclass(eq=False, repr=False)
class PerturbationModel(Fitted):
    """Model that `tl.fit_perturbation` returns and `tl.predict_perturbation(adata, model=...)` takes.

    Attributes
    ----------
    model
        Model that encodes control cells.
    screen
        Measurements of the screen.
    base
        Method for each kind of condition: a baseline, `"expected"` or, for a fine-tuned model, `"finetuned"`.
    design
        Columns of the screen (`perturbation_key`, `groupby`, `dose_key`), labels of control cells (`control`), and the
        `separator` of combinations.
    notes
        `validation`, `labels` (perturbations that are not genes), `seed`, `seconds`; `guides`, and `whole` (names that
        contain the separator), if there are any; for a fine-tuned model `loss`, the loss of every step.
    head
        Response head of a fine-tuned model; None without fine-tuning.
    """

    kind: ClassVar[str] = "perturbation_model"
    model: ScDiVa
    screen: Screen
    base: dict[Kind, str]
    design: ScreenDesign
    notes: dict[str, Any] = field(default_factory=dict)
    head: ResponseHead | None = None

    def _about(self) -> dict[str, object]:
        screen, design = self.screen, self.design
        return {
            "conditions": f"{len(screen.conditions)} of {len(screen.groups)} group(s) of cells",
            "genes": f"{len(screen.genes):,}",
            "fitted on": f"{screen.n_cells.sum():,} perturbed and {screen.n_control.sum():,} control cells",
            "columns": ", ".join(filter(None, (design.perturbation_key, design.groupby, design.dose_key))),
            "control": ", ".join(design.control),
            "predicts by": None if self.head is None else "fine-tuned transformer",
        }

    def check_design(self, design: ScreenDesign) -> None:
        """Raise an error if arguments of a call differ from the design of the screen; defaults are ignored."""
        default = ScreenDesign("").arguments
        for (name, value), fitted in zip(design.arguments.items(), self.design.arguments.values(), strict=True):
            if not any(set(np.atleast_1d(value)) == set(np.atleast_1d(other)) for other in (default[name], fitted)):
                fitted_with = f"with {name}={np.squeeze(fitted).tolist()!r}" if np.any(fitted) else f"without {name}"
                raise ValueError(
                    f"the model was fitted {fitted_with}, but {name}={np.squeeze(value).tolist()!r} was passed. Omit "
                    f"{name}, or pass a model to fit: model={DEFAULT_MODEL!r}."
                )

    def mean_change(self, targets: Conditions, states: NDArray[np.float32], species: Species = None) -> Predicted:
        """Predict the change of mean expression by baselines and the expected response; the transformer is not used.

        Parameters
        ----------
        targets
            Conditions to predict; groups from `len(screen.groups)` on are new.
        states
            `(n_new_groups, state_dim)`, mean states of the control cells of new groups.
        species
            Species of the perturbed genes.

        Raises
        ------
        ValueError
            If the method is not defined for a target.
        """
        screen = self.screen
        changes, sd = by_every_method(screen, targets, similarities_of(self.model, screen, targets, states, species))
        if self.head is not None:
            return Predicted(np.full_like(sd, np.nan), sd, changes, [FINETUNED] * len(targets))
        base = [self.base[kind] for kind in kinds(targets, screen.conditions)]
        change = np.stack([changes[name][row] for row, name in enumerate(base)])
        undefined = np.isnan(change).any(axis=1)
        if undefined.any():
            row = int(undefined.argmax())
            raise ValueError(
                f"method {base[row]!r} of this model is not defined for "
                f"{self.design.separator.join(targets.parts[row])!r}, which was not measured in another group. "
                "Fit again: scdiva.tl.fit_perturbation."
            )
        return Predicted(change, sd, {name: changes[name] for name in BASELINES}, base)

    def predict(self, targets: Conditions, controls: Controls) -> Predicted:
        """Predict the change of mean expression of control cells.

        Parameters
        ----------
        targets
            Conditions to predict; groups from `len(screen.groups)` on are new.
        controls
            The control cells.

        Raises
        ------
        ValueError
            If the method is not defined for a target.
        """
        new_states = controls.states[~np.isin(controls.groups, self.screen.groups)]
        predicted = self.mean_change(targets, new_states, controls.species)
        if self.head is None:
            return predicted
        return predicted._replace(change=self._finetuned_change(self.head, targets, controls))

    def _finetuned_change(self, head: ResponseHead, targets: Conditions, controls: Controls) -> NDArray[np.float64]:
        """Mean prediction of the fine-tuned transformer over up to 64 evenly spaced control cells of the group."""
        screen = self.screen
        names = list(screen.conditions.part_names)
        new = sorted(set(targets.part_names) - set(names))
        tokens = gene_tokens(self.model, new, controls.species)
        part_tokens = np.concatenate([head.part_tokens.cpu().numpy(), [tokens[name] for name in new]]).astype(np.int64)
        parts, strength = targets.holding([*names, *new]), strengths(targets, screen)
        groups = list(dict.fromkeys((*screen.groups, *controls.groups)))
        context = int((self.model.metadata or {})[FINETUNED]["training"]["context"])
        changes = []
        with torch.inference_mode():
            for row in progress_bar(range(len(targets)), desc="running the model", unit="condition"):
                of_group = controls.of_group(groups[targets.group[row]])
                cells = of_group[np.unique(np.linspace(0, len(of_group) - 1, MAX_CONTROLS).round().astype(np.int64))]
                rows = np.repeat(row, len(cells))
                change = predicted_change(
                    self.model, head, controls.cells, cells, parts[rows], part_tokens, strength[rows], context
                )
                changes.append(change.double().mean(dim=0).cpu().numpy())
        return np.stack(changes)

    def _contents(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        c = self.screen.conditions
        head = {} if self.head is None else {_HEAD + name: t for name, t in self.head.state_dict().items()}
        settings = {
            "genes": list(self.screen.genes),
            "groups": list(self.screen.groups),
            "parts": [list(parts) for parts in c.parts],
            "labels": list(self.screen.labels),
            "base": self.base,
            "given": self.design.arguments,
            "notes": self.notes,
        }
        tensors = {name: torch.from_numpy(getattr(self.screen, name)) for name in _SCREEN}
        return settings, tensors | head | {"group": torch.from_numpy(c.group), "dose": torch.from_numpy(c.dose)}

    @classmethod
    def _restored(cls, model: ScDiVa, settings: dict[str, Any], tensors: dict[str, Tensor]) -> Self:
        genes, groups = tuple(map(str, settings["genes"])), tuple(map(str, settings["groups"]))
        parts = tuple(tuple(map(str, names)) for names in settings["parts"])
        labels = tuple(map(str, settings["labels"]))
        base = {kind: str(settings["base"][kind]) for kind in (*KINDS, "measured")}
        head = {name: tensors.pop(name) for name in list(tensors) if name.startswith(_HEAD)}
        if not set(base.values()) <= ({FINETUNED} if head else set(METHODS)):
            raise ValueError(f"base {sorted(set(base.values()))}")
        if not genes or not groups or not all(parts) or len(labels) != len(parts):
            raise ValueError("genes, groups or parts out of range")
        notes = arrays(dict(settings["notes"]))
        design = ScreenDesign.from_notes({**settings["given"], **notes})
        n, g = len(parts), len(genes)
        expected: dict[str, tuple[int, ...]] = {
            "delta": (n, g),
            "control": (len(groups), g),
            "states": (len(groups), model.config.state_dim),
            "n_control": (len(groups),),
            **dict.fromkeys(("n_cells", "group", "dose"), (n,)),
            **dict.fromkeys(("variance", "level"), (g,)),
        }
        check_shapes(tensors, expected)
        group, dose = tensors["group"].numpy(), tensors["dose"].numpy()
        if n and not (group.dtype == np.int64 and group.min() >= 0 and group.max() < len(groups)):
            raise ValueError("group numbers are out of range")
        low = [tensors["n_cells"] < 1, tensors["n_control"] < 1, tensors["dose"] <= 0, tensors["variance"] < 0]
        if any(bool(part.any()) for part in low):
            raise ValueError("numbers of cells, doses or variances are out of range")
        measured = {name: tensors[name].numpy() for name in _SCREEN}
        screen = Screen(genes, groups, Conditions(parts, group, dose), labels, **measured)
        return cls(model, screen, base, design, notes, _restored_head(model, screen, head) if head else None)


def _restored_head(model: ScDiVa, screen: Screen, tensors: dict[str, Tensor]) -> ResponseHead:
    """Response head of a fine-tuned model, from the tensors of a folder."""
    if model.finetuned_for != "perturbation":
        raise ValueError("it contains a response head, but its model was not fine-tuned on perturbations")
    tensors = {name.removeprefix(_HEAD): tensor for name, tensor in tensors.items()}
    part_tokens, rank = tensors["part_tokens"], len(tensors["basis"])
    if part_tokens.dtype != torch.int64 or part_tokens.shape != (len(screen.conditions.part_names),):
        raise ValueError("it does not hold the tokens of the perturbed genes")
    in_range = (part_tokens == -1) | ((part_tokens >= N_SPECIAL) & (part_tokens < model.config.n_tokens))
    if not bool(in_range.all()):
        raise ValueError("its response head names tokens that its model does not have")
    with torch.random.fork_rng(devices=[]):
        head = ResponseHead(model.config.dim, len(screen.genes), rank, part_tokens)
    check_shapes(tensors, {name: tuple(t.shape) for name, t in head.state_dict().items()})
    head.load_state_dict(tensors)
    return head.requires_grad_(False).eval().to(next(model.parameters()).device)


def control_cells(
    adata: AnnData, fitted: PerturbationModel, guides: Mapping[str, str] | None, species: Species
) -> tuple[NDArray[np.int64], NDArray[np.object_]]:
    """Select control cells to predict from; all cells without a column of perturbations.

    Parameters
    ----------
    adata, guides, species
        As for :func:`scdiva.tl.predict_perturbation`.
    fitted
        The fitted model.

    Returns
    -------
    Row numbers of the control cells, and the group of each.
    """
    design = fitted.design
    group = group_names(adata, design.groupby)
    if design.perturbation_key not in adata.obs:
        is_control = np.ones(adata.n_obs, dtype=bool)
    elif guides is None:
        is_control = perturbations(adata, design).is_control
    else:
        labels = read_perturbations(adata, design, guides, fitted.model.vocabulary, species, is_fitted=True)
        is_control = labels.is_control
    return np.flatnonzero(is_control), group[is_control]


def finetune_fields(opened: OpenScreen, finetune: bool, **arguments: Any) -> dict[str, Any] | None:
    """Check the fine-tuning arguments of a call; expression is not read.

    Parameters
    ----------
    opened
        The screen.
    finetune, **arguments
        As for :func:`scdiva.train.finetune.finetune_config`.

    Returns
    -------
    Fields of :class:`scdiva.train.config.FinetuneConfig`; None without fine-tuning.

    Raises
    ------
    ValueError
        As :func:`scdiva.train.finetune.finetune_config`; or if `context` leaves no room for genes beyond the perturbed
        ones.
    """
    if not finetune and all(value is None for value in arguments.values()):
        return None
    from scdiva.perturbation.response_head import ResponseObjective
    from scdiva.train.finetune import finetune_config

    fields = finetune_config(finetune, opened.model, ResponseObjective, **arguments, through=True)
    assert fields is not None
    context, n_parts = fields.get("context", FinetuneConfig.context), int(opened.screen.conditions.n_parts.max())
    if context <= n_parts:
        raise ValueError(
            f"context={context} leaves no room for genes beyond the perturbed ones, up to {n_parts} in a combination. "
            f"Pass context={FinetuneConfig.context}."
        )
    return fields


def fit(
    adata: AnnData,
    opened: OpenScreen,
    device: str,
    seed: int,
    fields: dict[str, Any] | None = None,
    checkpoint_dir: str | PathLike[str] | None = None,
) -> tuple[PerturbationModel, Controls]:
    """Read the expression of a screen, choose the methods by cross-validation, and fine-tune if requested.

    Parameters
    ----------
    adata, opened
        The cells, and their screen.
    device
        Torch device to run the model on.
    seed
        Seed of the folds and of fine-tuning.
    fields, checkpoint_dir
        From :func:`finetune_fields`, and the folder of checkpoints; None: no fine-tuning.

    Returns
    -------
    The fitted model, and the control cells.
    """
    start = time.monotonic()
    screen, controls = read_screen(adata, opened, device)
    conditions = screen.conditions
    logger.info("fitting %d conditions of %d groups, %d genes", len(conditions), len(screen.groups), len(screen.genes))
    no_states = np.zeros((0, screen.states.shape[1]), dtype=np.float32)
    scores = validate(screen, similarities_of(opened.model, screen, conditions, no_states, controls.species), seed)
    genes = gene_tokens(opened.model, conditions.part_names, controls.species)
    labels = np.array([name for name in conditions.part_names if name not in genes], dtype=object)
    notes = {**opened.notes, "labels": labels, "validation": summary(scores), "seed": str(seed)}
    fitted = PerturbationModel(opened.model, screen, best_base(scores), opened.design, notes)
    if fields is not None:
        part_tokens = np.array([genes.get(name, -1) for name in conditions.part_names], dtype=np.int64)
        fitted, controls = _finetuned(fitted, controls, part_tokens, device, seed, fields, checkpoint_dir)
    fitted.notes["seconds"] = time.monotonic() - start
    return fitted, controls


def _finetuned(
    fitted: PerturbationModel,
    controls: Controls,
    part_tokens: NDArray[np.int64],
    device: str,
    seed: int,
    fields: dict[str, Any],
    checkpoint_dir: str | PathLike[str] | None,
) -> tuple[PerturbationModel, Controls]:
    """Fine-tune the transformer of a fitted model; encode the control cells by the new weights."""
    from scdiva.perturbation.response_head import MeasuredChanges, finetune_for_perturbation

    screen, conditions = fitted.screen, fitted.screen.conditions
    measured = MeasuredChanges(
        cells=controls.cells,
        parts=conditions.holding(conditions.part_names),
        part_tokens=part_tokens,
        group=conditions.group,
        strength=strengths(conditions, screen),
        delta=screen.delta,
        control=screen.control,
    )
    logger.info("fine-tuning on %d conditions on %s", len(conditions), device)
    precision = settings.resolve_precision(None, device)
    network, head, history = finetune_for_perturbation(
        fitted.model, measured, fields, seed, precision, device, checkpoint_dir
    )
    cells = controls.cells.subset(np.arange(controls.cells.n_cells), network.config.input_length)
    controls = controls._replace(cells=cells, states=group_states(network, cells, device))
    tuned = PerturbationModel(
        network,
        replace(screen, states=controls.states),
        dict.fromkeys((*KINDS, "measured"), FINETUNED),
        fitted.design,
        {**fitted.notes, "loss": np.array(history["loss"])},
        head,
    )
    return tuned, controls


def strengths(conditions: Conditions, screen: Screen) -> NDArray[np.float64]:
    """Strength of each dose, log2(1 + dose / median dose of the screen)."""
    return np.log2(1 + conditions.dose / float(np.median(screen.conditions.dose)))
