"""A model fitted on a perturbation screen: what was measured, and what predicts conditions that were not."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scdiva._checks import warn
from scdiva._constants import BASELINES, EXPECTED, FINETUNED, N_SPECIAL
from scdiva._rng import step_seed
from scdiva._running import model_name
from scdiva._settings import logger, progress_bar, settings
from scdiva.data.options import InputOptions, Species
from scdiva.data.results import check_columns
from scdiva.models._fitted import Fitted, arrays, check_shapes
from scdiva.models.pretrained import load_for
from scdiva.models.scdiva import ScDiVa
from scdiva.perturbation.conditions import Naming, guides_as_noted, perturbations, read_perturbations
from scdiva.perturbation.response import Similarities, baselines, expected_response, similarities_of
from scdiva.perturbation.response_head import ResponseHead, predicted_change
from scdiva.perturbation.screen import (
    Conditions,
    Controls,
    Screen,
    design,
    gene_tokens,
    group_names,
    group_states,
    read_screen,
)
from scdiva.train.config import FinetuneConfig

if TYPE_CHECKING:
    from anndata import AnnData

Kind = Literal["single", "combination", "group", "measured"]
"""What is new about a condition: a perturbation of one part, of several, the group of cells it is done to; or nothing,
as it was measured."""
KINDS: tuple[Kind, ...] = ("single", "combination", "group")
"""Those of which something is new."""
METHODS = (*BASELINES, EXPECTED)
FOLDS = 5
LEAST_GAIN = 0.005
"""Correlation that a baseline has to be better by, if it is to be used."""
COLUMNS = ("perturbation_key", "control", "groupby", "dose_key", "separator")
"""What is noted of the study design."""
Columns = tuple[str | None, Sequence[str] | str, str | None, str | None, str]
"""These, as they are given."""
MAX_CONTROLS = 64
"""Control cells of a group over which a fine-tuned network's prediction is averaged."""
_HEAD = "response."
"""Beginning of the names of the response head's tensors in a folder."""
_SCREEN = ("delta", "n_cells", "control", "n_control", "states", "variance", "level")


class Predicted(NamedTuple):
    """Mean change of expression, each `(n_targets, n_genes)`.

    Attributes
    ----------
    change
        By what :attr:`PerturbationModel.base` names.
    sd
        Standard deviation of the expected response.
    baselines
        By name; of a fine-tuned model the expected response, too.
    base
        Name of what predicts each target.
    """

    change: NDArray[np.float64]
    sd: NDArray[np.float64]
    baselines: dict[str, NDArray[np.float64]]
    base: list[str]


@dataclass(eq=False, repr=False)
class PerturbationModel(Fitted):
    """What `tl.fit_perturbation` fits; `tl.predict_perturbation(adata, model=...)` predicts with it.

    Attributes
    ----------
    model
        The network that control cells are run through.
    screen
        What was measured.
    base
        What predicts, for each kind of condition: a baseline, `"expected"` or, of a fine-tuned model, `"finetuned"`.
    perturbation_key, control, groupby, dose_key, separator
        As they were given, `control` as a tuple; `""` for none.
    notes
        What was found in fitting: `validation`, `labels` (perturbations that are no genes), `seed`, `seconds`;
        `guides`, and `whole` names that contain the separator, where there are any; and of a fine-tuned model `loss`,
        that of every step.
    head
        Response head of a fine-tuned model; None without fine-tuning.
    """

    kind: ClassVar[str] = "perturbation_model"
    model: ScDiVa
    screen: Screen
    base: dict[Kind, str]
    perturbation_key: str
    control: tuple[str, ...]
    groupby: str = ""
    dose_key: str = ""
    separator: str = "+"
    notes: dict[str, Any] = field(default_factory=dict)
    head: ResponseHead | None = None

    @property
    def naming(self) -> Naming:
        """How labels name perturbations."""
        return Naming(self.control, self.separator, frozenset(map(str, self.notes.get("whole", ()))))

    def _about(self) -> dict[str, object]:
        screen = self.screen
        return {
            "conditions": f"{len(screen.conditions)} of {len(screen.groups)} group(s) of cells",
            "genes": f"{len(screen.genes):,}",
            "fitted on": f"{screen.n_cells.sum():,} perturbed and {screen.n_control.sum():,} control cells",
            "columns": ", ".join(filter(None, (self.perturbation_key, self.groupby, self.dose_key))),
            "control": ", ".join(self.control),
            "predicts by": None if self.head is None else "fine-tuned transformer",
        }

    def check_columns(self, columns: Columns) -> None:
        """Refuse arguments of :func:`scdiva.tl.predict_perturbation` by which this model was not fitted.

        `"control"` and `"+"`, which stand there by default, count as not given.
        """
        perturbation_key, control, groupby, dose_key, separator = columns
        labels = Naming.of(control, separator).control
        given: dict[str, Any] = {"perturbation_key": perturbation_key, "groupby": groupby, "dose_key": dose_key}
        if labels != ("control",) and set(labels) != set(self.control):
            given["control"] = list(labels) if len(labels) > 1 else labels[0]
        if separator != "+":
            given["separator"] = separator
        for name, value in given.items():
            fitted = getattr(self, name)
            if name == "control":
                fitted = list(fitted) if len(fitted) > 1 else fitted[0]
            if value not in (None, fitted):
                raise ValueError(
                    f"this model was fitted with {name}={fitted!r}, not {value!r}: leave it out, or name a model to "
                    "fit one."
                )

    def mean_change(self, targets: Conditions, states: NDArray[np.float32], species: Species = None) -> Predicted:
        """Predict the mean change of expression by baselines and the expected response: no block of a network is run.

        Parameters
        ----------
        targets
            What to predict; groups from `len(screen.groups)` on are new.
        states
            `(n_new_groups, state_dim)`, mean states of the control cells of new groups.
        species
            Whose genes are perturbed.

        Raises
        ------
        ValueError
            If what predicts is not defined for a target.
        """
        screen = self.screen
        made, sd = by_every_method(screen, targets, similarities_of(self.model, screen, targets, states, species))
        if self.head is not None:
            return Predicted(np.full_like(sd, np.nan), sd, made, [FINETUNED] * len(targets))
        named = [self.base[kind] for kind in kinds(targets, screen.conditions)]
        change = np.stack([made[name][row] for row, name in enumerate(named)])
        undefined = np.isnan(change).any(axis=1)
        if undefined.any():
            row = int(undefined.argmax())
            raise ValueError(
                f"base {named[row]!r} of this model is not defined for {self.separator.join(targets.parts[row])!r}, "
                "which was not measured in another group: fit again, scdiva.tl.fit_perturbation."
            )
        return Predicted(change, sd, {name: made[name] for name in BASELINES}, named)

    def predict(self, targets: Conditions, controls: Controls) -> Predicted:
        """Predict the mean change of expression of control cells.

        Parameters
        ----------
        targets
            What to predict; groups from `len(screen.groups)` on are new.
        controls
            The control cells.

        Raises
        ------
        ValueError
            If what predicts is not defined for a target.
        """
        found = self.mean_change(targets, controls.states_beyond(self.screen), controls.species)
        if self.head is None:
            return found
        return found._replace(change=self._finetuned_change(targets, controls))

    def _finetuned_change(self, targets: Conditions, controls: Controls) -> NDArray[np.float64]:
        """Predict by the fine-tuned network: the mean over up to 64 control cells of the group, evenly spaced."""
        assert self.head is not None
        screen, head = self.screen, self.head
        names = list(screen.conditions.part_names)
        new = sorted(set(targets.part_names) - set(names))
        tokens = gene_tokens(self.model, new, controls.species)
        part_tokens = np.concatenate([head.part_tokens.cpu().numpy(), [tokens[name] for name in new]]).astype(np.int64)
        parts, strength = targets.holding([*names, *new]), strengths(targets, screen)
        groups = list(dict.fromkeys((*screen.groups, *controls.groups)))
        context = int((self.model.metadata or {})[FINETUNED]["training"]["context"])
        found = []
        with torch.inference_mode():
            for row in progress_bar(range(len(targets)), desc="running the model", unit="condition"):
                there = controls.of_group(groups[targets.group[row]])
                cells = there[np.unique(np.linspace(0, len(there) - 1, MAX_CONTROLS).round().astype(np.int64))]
                of_cells = np.repeat(row, len(cells))
                change = predicted_change(
                    self.model, head, controls.cells, cells, parts[of_cells], part_tokens, strength[of_cells], context
                )
                found.append(change.double().mean(dim=0).cpu().numpy())
        return np.stack(found)

    def _contents(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        c = self.screen.conditions
        head = {} if self.head is None else {_HEAD + name: t for name, t in self.head.state_dict().items()}
        settings = {
            "genes": list(self.screen.genes),
            "groups": list(self.screen.groups),
            "parts": [list(parts) for parts in c.parts],
            "labels": list(self.screen.labels),
            "base": self.base,
            "given": {name: getattr(self, name) for name in COLUMNS},
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
        of_head = {name: tensors.pop(name) for name in list(tensors) if name.startswith(_HEAD)}
        if not set(base.values()) <= ({FINETUNED} if of_head else set(METHODS)):
            raise ValueError(f"base {sorted(set(base.values()))}")
        if not genes or not groups or not all(parts) or len(labels) != len(parts):
            raise ValueError("genes, groups or parts out of range")
        given: dict[str, Any] = {name: str(settings["given"][name]) for name in COLUMNS}
        given["control"] = Naming.of(settings["given"]["control"], "").control
        notes = arrays(dict(settings["notes"]))
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
            raise ValueError("it names a group that is not there")
        low = [tensors["n_cells"] < 1, tensors["n_control"] < 1, tensors["dose"] <= 0, tensors["variance"] < 0]
        if any(bool(part.any()) for part in low):
            raise ValueError("it holds numbers of cells, doses or variances that are out of range")
        measured = {name: tensors[name].numpy() for name in _SCREEN}
        screen = Screen(genes, groups, Conditions(parts, group, dose), labels, **measured)
        head = _restored_head(model, screen, of_head) if of_head else None
        return cls(model, screen, base, **given, notes=notes, head=head)


def _restored_head(model: ScDiVa, screen: Screen, tensors: dict[str, Tensor]) -> ResponseHead:
    """Make the response head of a fine-tuned model from the tensors of a folder, which are checked."""
    if model.finetuned_for != "perturbation":
        raise ValueError("it holds a response head, and its network was not fine-tuned on perturbations")
    tensors = {name.removeprefix(_HEAD): tensor for name, tensor in tensors.items()}
    part_tokens, rank = tensors["part_tokens"], len(tensors["basis"])
    n_parts = len(screen.conditions.part_names)
    if part_tokens.dtype != torch.int64 or part_tokens.shape != (n_parts,):
        raise ValueError("it does not hold the tokens of what is perturbed")
    known = (part_tokens == -1) | ((part_tokens >= N_SPECIAL) & (part_tokens < model.config.n_tokens))
    if not bool(known.all()):
        raise ValueError("its response head names tokens that its network does not have")
    with torch.random.fork_rng(devices=[]):
        head = ResponseHead(model.config.dim, len(screen.genes), rank, part_tokens)
    check_shapes(tensors, {name: tuple(t.shape) for name, t in head.state_dict().items()})
    head.load_state_dict(tensors)
    return head.requires_grad_(False).eval().to(next(model.parameters()).device)


def open_screen(
    adata: AnnData,
    columns: Columns,
    guides: Mapping[str, str] | None,
    given: ScDiVa | str | PathLike[str],
    device: str,
    reading: InputOptions,
) -> tuple[PerturbationModel, NDArray[np.int64]]:
    """Open a screen that a model is to be fitted on; its matrix is not read.

    Parameters
    ----------
    adata, guides, device
        As for :func:`scdiva.tl.fit_perturbation`.
    columns
        The study design.
    given
        The model, as the user gave it.
    reading
        What will be read.

    Returns
    -------
    The model before it is fitted, and the number of each cell's condition (:func:`scdiva.perturbation.screen.design`).
    """
    perturbation_key, control, groupby, dose_key, separator = columns
    if perturbation_key is None:
        raise ValueError("Name the column with the perturbations, perturbation_key, or a fitted model as model=.")
    model = load_for(given, device)
    check_columns(perturbation_key, groupby, dose_key)
    known = read_perturbations(adata, perturbation_key, control, separator, guides, model.vocabulary, reading.species)
    screen, number = design(adata, known, groupby, dose_key, reading)
    if len(screen.conditions) == 1:
        warn(
            "the screen holds one condition: what is predicted of others is what it changed, and nothing can be said "
            "of how good that is."
        )
    notes = {"model": model_name(given), **known.notes}
    base = dict.fromkeys((*KINDS, "measured"), EXPECTED)
    named: dict[str, Any] = dict(zip(COLUMNS, ("" if name is None else name for name in columns), strict=True))
    named["control"] = known.naming.control
    return PerturbationModel(model, screen, base, **named, notes=notes), number


def control_cells(
    adata: AnnData, fitted: PerturbationModel, guides: Mapping[str, str] | None, species: Species
) -> tuple[NDArray[np.int64], NDArray[np.object_]]:
    """Choose control cells to predict from; all cells are, if there is no column of perturbations.

    Parameters
    ----------
    adata, guides, species
        As for :func:`scdiva.tl.predict_perturbation`.
    fitted
        The model to predict with.

    Returns
    -------
    Their rows, and the group of each.
    """
    key = fitted.perturbation_key
    group = group_names(adata, fitted.groupby)
    if key not in adata.obs:
        chosen = np.ones(adata.n_obs, dtype=bool)
    elif guides is not None:
        how = fitted.control, fitted.separator, guides, fitted.model.vocabulary, species
        chosen = read_perturbations(adata, key, *how, fitted=True).is_control
    else:
        chosen = perturbations(adata, key, fitted.naming, guides_as_noted(fitted.notes)).is_control
    return np.flatnonzero(chosen), group[chosen]


def fit(
    adata: AnnData,
    opened: PerturbationModel,
    number: NDArray[np.int64],
    device: str,
    reading: InputOptions,
    seed: int,
    tuning: dict[str, Any] | None = None,
    checkpoint_dir: str | PathLike[str] | None = None,
) -> tuple[PerturbationModel, Controls]:
    """Read a screen, and choose what to predict by, as it predicts conditions that are left out; or fine-tune.

    Parameters
    ----------
    adata, device, reading
        Cells, where to run the model, and what to read.
    opened, number
        From :func:`open_screen`.
    seed
        Of the folds, and of fine-tuning.
    tuning, checkpoint_dir
        From :func:`finetuning`, and where it keeps its checkpoints; None: no weight is trained.

    Returns
    -------
    The fitted model, and the control cells.
    """
    begun = time.monotonic()
    screen, controls = read_screen(adata, opened.screen, number, opened.model, device, reading)
    logger.info(
        "fitting %d conditions of %d groups, %d genes", len(screen.conditions), len(screen.groups), len(screen.genes)
    )
    none = np.zeros((0, screen.states.shape[1]), dtype=np.float32)
    scores = validate(screen, similarities_of(opened.model, screen, screen.conditions, none, controls.species), seed)
    genes = gene_tokens(opened.model, screen.conditions.part_names, controls.species)
    labels = np.array([name for name in screen.conditions.part_names if name not in genes], dtype=object)
    found: dict[str, Any] = {"labels": labels, "validation": summary(scores), "seed": str(seed)}
    fitted = replace(opened, screen=screen, base=best_base(scores))
    if tuning is not None:
        from scdiva.perturbation.finetune import MeasuredChanges, finetune_for_perturbation

        names = screen.conditions.part_names
        measured = MeasuredChanges(
            cells=controls.cells,
            parts=screen.conditions.holding(names),
            part_tokens=np.array([genes.get(name, -1) for name in names], dtype=np.int64),
            group=screen.conditions.group,
            strength=strengths(screen.conditions, screen),
            delta=screen.delta,
            control=screen.control,
        )
        logger.info("fine-tuning on %d conditions on %s", len(screen.conditions), device)
        precision = settings.resolve_precision(None, device)
        network, head, history = finetune_for_perturbation(
            opened.model, measured, tuning, seed, precision, device, checkpoint_dir
        )
        cells = controls.cells.subset(np.arange(controls.cells.n_cells), network.config.input_length)
        controls = controls._replace(cells=cells, states=group_states(network, cells, device))
        fitted = replace(
            fitted,
            model=network,
            screen=replace(screen, states=controls.states),
            base=dict.fromkeys((*KINDS, "measured"), FINETUNED),
            head=head,
        )
        found["loss"] = np.array(history["loss"])
    return replace(fitted, notes=opened.notes | found | {"seconds": time.monotonic() - begun}), controls


def finetuning(opened: PerturbationModel, finetune: bool, **given: Any) -> dict[str, Any] | None:
    """Check the fine-tuning arguments of a call against a screen and its model; no expression is read.

    Parameters
    ----------
    opened
        From :func:`open_screen`.
    finetune, **given
        As for :func:`scdiva.train.finetune.finetune_config`, whose result is returned.

    Raises
    ------
    ValueError
        As there; or if `context` leaves no room for genes beyond those that are perturbed together.
    """
    if not finetune and all(value is None for value in given.values()):
        return None
    from scdiva.perturbation.finetune import ResponseObjective
    from scdiva.train.finetune import finetune_config

    fields = finetune_config(finetune, opened.model, ResponseObjective, **given, through=True)
    assert fields is not None
    context, most = fields.get("context", FinetuneConfig.context), int(opened.screen.conditions.n_parts.max())
    if context <= most:
        raise ValueError(
            f"context={context} leaves no room for a cell's genes after those perturbed, up to {most} at once: pass "
            f"context={FinetuneConfig.context}."
        )
    return fields


def strengths(conditions: Conditions, screen: Screen) -> NDArray[np.float64]:
    """Strength of perturbations by their dose, log2(1 + dose / median dose of the screen)."""
    return np.log2(1 + conditions.dose / float(np.median(screen.conditions.dose)))


def by_every_method(
    screen: Screen, targets: Conditions, similarities: Similarities
) -> tuple[dict[str, NDArray[np.float64]], NDArray[np.float64]]:
    """Predict the mean change by each of :data:`METHODS`; the standard deviation of the expected response beside.

    Parameters
    ----------
    screen, targets, similarities
        As for :func:`scdiva.perturbation.response.expected_response`.
    """
    expected, sd = expected_response(screen, targets, similarities)
    return {**baselines(screen, targets), EXPECTED: expected}, sd


def kinds(targets: Conditions, measured: Conditions) -> list[Kind]:
    """Say of each target what is new about it, given what was measured.

    One that was measured in its group, at whatever dose, is `"measured"`; one that was in other groups only is new in
    its `"group"`; else a condition is a `"combination"` if it has several parts, or `"single"`.

    Parameters
    ----------
    targets, measured
        Conditions with the same numbers of groups.
    """
    found: list[Kind] = []
    anywhere, there = set(measured.parts), set(zip(measured.parts, measured.group.tolist(), strict=True))
    for parts, group in zip(targets.parts, targets.group.tolist(), strict=True):
        new: Kind = "combination" if len(parts) > 1 else "single"
        found.append("measured" if (parts, group) in there else "group" if parts in anywhere else new)
    return found


def folds(screen: Screen, kind: Kind, seed: int) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Leave conditions out as predictions of a kind do: numbers of those kept, and of those left out.

    `"single"`: a fifth of the genes and labels that were perturbed alone, with every combination that holds one; only
    the single ones are predicted. `"combination"`: a fifth of the combinations. `"group"`: all perturbations of one
    group of cells, of at most five; predicted are those that other groups had too.

    Parameters
    ----------
    screen
        What was measured.
    kind
        What to leave out.
    seed
        Of the choice.
    """
    c = screen.conditions
    rng = np.random.default_rng(step_seed(seed, KINDS.index(kind), "folds"))
    if kind == "group":
        same = c.same(c)
        for group in rng.permutation(np.unique(c.group))[:FOLDS]:
            kept = c.group != group
            elsewhere = (same & kept).any(axis=1) & ~kept
            if elsewhere.any():
                yield np.flatnonzero(kept), np.flatnonzero(elsewhere)
        return
    units = sorted({parts for parts in c.parts if (len(parts) > 1) == (kind == "combination")})
    if len(units) < 2:
        return
    for chosen in np.array_split(rng.permutation(len(units)), min(FOLDS, len(units))):
        out = {units[i] for i in chosen}
        predicted = np.array([parts in out for parts in c.parts])
        gone = predicted
        if kind == "single":
            gone = c.holding([parts[0] for parts in out]).sum(axis=1) > 0
        if not gone.all():
            yield np.flatnonzero(~gone), np.flatnonzero(predicted)


class Scores(NamedTuple):
    """Scores of conditions that were left out.

    Attributes
    ----------
    kind
        What was left out with each.
    mse, pearson
        `(n, n_methods)`, mean squared error and Pearson correlation of the change; NaN where a method is not defined,
        and a correlation of 0 where a prediction is the same for all genes.
    """

    kind: NDArray[np.object_]
    mse: NDArray[np.float64]
    pearson: NDArray[np.float64]


def validate(screen: Screen, similarities: Similarities, seed: int) -> Scores:
    """Predict every condition that can be left out, by every method, from those that are kept, and score it.

    Parameters
    ----------
    screen, similarities
        What was measured, and the similarities that the model gives.
    seed
        Of the folds.
    """
    kind_of, mse, pearson = [], [np.empty((0, len(METHODS)))], [np.empty((0, len(METHODS)))]
    every_fold = [(kind, *fold) for kind in KINDS for fold in folds(screen, kind, seed)]
    for kind, kept, out in progress_bar(every_fold, desc="validating", unit="fold"):
        made, _ = by_every_method(screen.only(kept), screen.conditions.only(out), similarities)
        every = np.stack([made[name] for name in METHODS], axis=1).astype(np.float32).astype(np.float64)
        for row, predicted in zip(out, every, strict=True):
            truth = screen.delta[row].astype(np.float64)
            error = np.square(predicted - truth).mean(axis=1)
            p, t = predicted - predicted.mean(axis=1, keepdims=True), truth - truth.mean()
            size = np.sqrt(np.square(p).sum(axis=1) * np.square(t).sum())
            kind_of.append(kind)
            mse.append(error[None])
            pearson.append(np.where(np.isnan(error), np.nan, (p @ t) / np.maximum(size, 1e-12))[None])
    return Scores(np.array(kind_of, dtype=object), np.vstack(mse), np.vstack(pearson))


def best_base(scores: Scores) -> dict[Kind, str]:
    """Choose for each kind what predicts.

    The expected response, unless a baseline correlates clearly better with what was measured: by
    :data:`LEAST_GAIN` and the standard error of the difference. (By squared error no change at all wins where most of a
    change is noise.)

    Parameters
    ----------
    scores
        Of conditions that were left out.
    """
    chosen: dict[Kind, str] = {"measured": EXPECTED}
    for kind in KINDS:
        pearson = scores.pearson[scores.kind == kind]
        gain = pearson[:, :-1] - pearson[:, -1:]
        if len(gain) < 3:
            chosen[kind] = EXPECTED
            continue
        over = np.nan_to_num(gain.mean(axis=0) - gain.std(axis=0, ddof=1) / len(gain) ** 0.5, nan=-np.inf)
        chosen[kind] = METHODS[int(over.argmax())] if over.max() > LEAST_GAIN else EXPECTED
    return chosen


def summary(scores: Scores) -> dict[str, NDArray[Any]]:
    """Mean scores by kind and method, as columns of equal length.

    Parameters
    ----------
    scores
        Of conditions that were left out.
    """
    rows = []
    for kind in KINDS:
        for column, method in enumerate(METHODS):
            there = (scores.kind == kind) & ~np.isnan(scores.mse[:, column])
            if there.any():
                means = (part[there, column].mean() for part in (scores.pearson, scores.mse))
                rows.append((method, kind, *means, int(there.sum())))
    columns = zip(*rows, strict=True) if rows else ((),) * 5
    types = {"method": object, "kind": object, "pearson_delta": np.float64, "mse": np.float64, "n": np.int64}
    return {name: np.array(part, dtype=types[name]) for name, part in zip(types, columns, strict=True)}
