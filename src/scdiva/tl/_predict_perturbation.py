"""`tl.predict_perturbation`: cells under perturbations that were not measured, with simple predictions beside."""

from __future__ import annotations

import operator
import time
import warnings
from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from scdiva import _constants as C
from scdiva._settings import logger, settings
from scdiva._threads import torch_threads_kept
from scdiva.data.conditions import column, perturbations
from scdiva.data.writing import check_anndata
from scdiva.tl._notes import model_name, seed_of
from scdiva.tl._predicted import Asked, predicted_cells
from scdiva.tl._screen import check_genes, read_controls, read_screen, refuse_unknown, what_was_done

if TYPE_CHECKING:
    import torch
    from anndata import AnnData

    from scdiva.models import PerturbationModel, ScDiVa


def fit_perturbation(
    adata: AnnData,
    perturbation_key: str,
    control: str = "control",
    *,
    groupby: str | None = None,
    dose_key: str | None = None,
    separator: str = "+",
    model: ScDiVa | str | PathLike[str] = C.DEFAULT_MODEL,
    residual: str | None = "auto",
    loss: Literal["wmse", "de", "mse"] = "wmse",
    strategy: Literal["auto", "none", "head", "lora", "full"] = "auto",
    max_epochs: int = 30,
    patience: int = 4,
    minutes: float | None = None,
    batch_size: int = 32,
    learning_rate: float = 3e-4,
    layer: str | None = None,
    use_raw: bool = False,
    input: Literal["auto", "counts", "lognorm"] = "auto",
    gene_ids: str | None = None,
    duplicates: Literal["sum", "error"] = "sum",
    rng: int | np.random.Generator | torch.Generator | None = None,
    device: str | None = None,
) -> PerturbationModel:
    r"""Fit a model on a perturbation screen: perturbed cells, and control cells beside them.

    A prediction has two parts. The first is an expected response, a Gaussian process over conditions in which effects
    of genes add up and carry over to similar genes and similar groups of cells (:mod:`scdiva.models.response`), or,
    with `residual`, one of the simple baselines. The second is a network: it reads a control cell with the perturbed
    genes marked, their values hidden, in front of all others (so that they are never cut off), and predicts for that
    cell what the first part leaves of the change of every gene of `adata` (paper, section on perturbation prediction).
    It learns from conditions that the first part was fitted without, is stopped by others that are held out, and is
    dropped where these are predicted no better with it, as `notes["network"]` says. Of fewer than 20 conditions none
    is trained.

    Parameters
    ----------
    adata
        Cells × genes, perturbed and control cells, raw counts or log-normalised expression; not changed.
    perturbation_key
        Column of `adata.obs` with the perturbation of each cell: a gene, a label such as a drug, or several of them.
    control
        Its value for unperturbed cells. In combinations (`"A+control"`) it does not count.
    groupby
        Column with groups of cells, such as cell types or lines; changes are those from control cells of the same
        group.
    dose_key
        Column with the dose of each perturbed cell, in any unit.
    separator
        What stands between the parts of a combination; `""` if there are none.
    model
        A loaded model, a model folder, the name of a bundled model, or `"hf://owner/name"`; not changed.
    residual
        What the network is added to: `"expected"`, the expected response; a baseline, `"no_change"`, `"train_mean"`,
        `"matching_mean"`, `"additive"`, `"linear"` or `"elsewhere"` (:func:`scdiva.models.baselines.baselines`);
        `"auto"`, the expected response or a baseline that predicts conditions that are left out clearly better, chosen
        apart for single perturbations, combinations and new groups (what was measured gets the expected response, and
        nothing from the network); or None: the network predicts the whole change, as in the paper, and is kept however
        good it is.
    loss
        Error of the network: `"wmse"`, weighted by a gene's expression in control cells (paper, eqs. wmse_weights and
        wmse); `"de"`, half of the weight by how clearly a gene changes; `"mse"`.
    strategy
        `"head"` trains the mark and the layers behind the transformer, `"lora"` and `"full"` the transformer too;
        `"none"` does without the network. `"auto"` is `"head"` on a CPU and `"lora"` elsewhere.
    max_epochs, patience, minutes, batch_size, learning_rate
        Of the network: most passes over the control cells, looks at the held-out conditions without a better error
        after which it ends, most wall time, cells of a step, and learning rate of AdamW.
    layer, use_raw, input, gene_ids, duplicates
        What to read, as for :func:`embed`.
    rng
        Seed; None takes `scdiva.settings.seed`. Global random state is never touched. On a CPU the same seed gives the
        same result.
    device
        Torch device; None takes `scdiva.settings.device`.

    Returns
    -------
    The fitted model, for `tl.predict_perturbation(adata, model=fitted)` and `tl.rank_perturbations`;
    `fitted.save(folder)` keeps it. `fitted.notes["validation"]` holds how well each baseline and the expected response
    predict conditions that are left out (Pearson correlation and mean squared error of the change).

    Raises
    ------
    KeyError
        If a column or layer does not exist.
    ValueError
        If there are no control cells (in a group), or nothing else, or too few conditions for a network that is to
        predict alone; if a name or dose is missing or makes no sense; if
        genes repeat a name, an argument is out of range, or the matrix is refused as by :func:`embed`.
    TypeError
        If `adata` is no AnnData object.

    Warns
    -----
    UserWarning
        If a condition was measured in one cell, or there is one condition only.

    Examples
    --------
    >>> import scdiva as sd
    >>> screen = sd.datasets.toy(120, 100)
    >>> screen.obs["perturbation"] = ["control", "A", "B", "A+B", "C", "B+C"] * 20
    >>> fitted = sd.tl.fit_perturbation(screen, "perturbation", strategy="none")
    >>> predicted = sd.tl.predict_perturbation(screen, model=fitted, predict=["A+C"])
    >>> set(predicted.obs["scdiva_condition"])
    {'A+C'}
    """
    begun = time.monotonic()
    check_anndata(adata)
    _check(residual, loss, strategy, minutes, learning_rate)
    for name, value, least in (("max_epochs", max_epochs, 1), ("patience", patience, 1), ("batch_size", batch_size, 2)):
        if operator.index(value) < least:
            raise ValueError(f"{name} must be at least {least}, got {value}.")
    reading: dict[str, Any] = {
        "layer": layer,
        "use_raw": use_raw,
        "input": input,
        "gene_ids": gene_ids,
        "duplicates": duplicates,
    }
    done = what_was_done(adata, perturbation_key, control, groupby, dose_key, separator)

    from scdiva.models import PerturbationModel
    from scdiva.models.perturbation import numbered_labels
    from scdiva.models.pretrained import load_for
    from scdiva.models.screen import KINDS
    from scdiva.train.adaptation import Limits
    from scdiva.train.perturbation import fit_responses
    from scdiva.train.task_config import PerturbationConfig

    target = settings.resolve_device(device)
    given = load_for(model, target)
    chosen = ("head" if target == "cpu" else "lora") if strategy == "auto" else strategy
    seed = seed_of(rng)
    config = PerturbationConfig(batch_size=batch_size, learning_rate=learning_rate, seed=seed, loss=loss)
    screen, controls = read_screen(adata, given, done, target, **reading)
    if len(screen.conditions) == 1:
        warnings.warn(
            "the screen holds one condition: what is predicted of others is what it changed, and nothing can be said "
            "of how good that is.",
            UserWarning,
            stacklevel=2,
        )
    labels = numbered_labels(given, screen)
    logger.info(
        "fitting %d conditions of %d groups, %d genes, strategy %r; %d labels are no genes of the vocabulary",
        len(screen.conditions), len(screen.groups), len(screen.genes), chosen, len(labels),
    )  # fmt: skip
    limits = Limits(max_epochs, patience, np.inf if minutes is None else 60 * minutes)
    with torch_threads_kept(1 if target == "cpu" else None):  # products too small to share
        found = fit_responses(
            given, screen, controls.cells, set(KINDS), cast("Any", chosen), residual, config, limits,
            device=target, progress=settings.progress,
        )  # fmt: skip
    notes = {
        **found.notes,
        "labels": np.array(list(labels), dtype=object),
        "model": model_name(model),
        "seed": str(seed),
        "seconds": time.monotonic() - begun,
    }
    return PerturbationModel(
        found.model, screen, found.base, found.head, perturbation_key, control, groupby or "", dose_key or "",
        separator, notes,
    )  # fmt: skip


def predict_perturbation(
    adata: AnnData,
    perturbation_key: str | None = None,
    control: str = "control",
    *,
    predict: Sequence[str] | str | None = None,
    groupby: str | None = None,
    groups: Sequence[str] | str | None = None,
    dose_key: str | None = None,
    dose: float | Sequence[float] | None = None,
    separator: str = "+",
    model: PerturbationModel | ScDiVa | str | PathLike[str] = C.DEFAULT_MODEL,
    residual: str | None = "auto",
    loss: Literal["wmse", "de", "mse"] = "wmse",
    strategy: Literal["auto", "none", "head", "lora", "full"] = "auto",
    max_epochs: int = 30,
    patience: int = 4,
    minutes: float | None = None,
    batch_size: int = 32,
    learning_rate: float = 3e-4,
    n_cells: int = 100,
    layer: str | None = None,
    use_raw: bool = False,
    input: Literal["auto", "counts", "lognorm"] = "auto",
    gene_ids: str | None = None,
    duplicates: Literal["sum", "error"] = "sum",
    rng: int | np.random.Generator | torch.Generator | None = None,
    device: str | None = None,
) -> AnnData:
    """Predict cells under perturbations: of single genes, of several, of genes never perturbed, in new groups of cells.

    Fits a model on the screen in `adata` (:func:`fit_perturbation`), unless a fitted one is given, and predicts what
    each perturbation makes of control cells. What simple baselines predict lies beside it in the result, so that it can
    be held against them (:func:`score_perturbation`, `scdiva.get.perturbation_df`, `scdiva.pl.perturbation`).

    A predicted cell is a control cell with the change of its group's mean, and what the network adds for this cell. A
    gene's mean changes by the number of cells that express it, and by how much these do
    (:func:`scdiva.models.shifted.shift_cells`).

    Parameters
    ----------
    adata
        Cells × genes, raw counts or log-normalised expression; not changed. With a fitted model only its control cells
        count; all cells do if it has no column `perturbation_key`.
    perturbation_key, control
        What was done to the cells, see :func:`fit_perturbation`. Left out with a fitted model, which knows it.
    predict
        Perturbations, such as `["KLF1", "KLF1+TGFBR2"]`; genes of the model's vocabulary, and labels that the screen
        holds. None: all that were measured.
    groupby
        Column with groups of cells, see :func:`fit_perturbation`.
    groups
        Groups in which to predict; None: all that have control cells.
    dose_key
        Column with doses, see :func:`fit_perturbation`.
    dose
        Doses at which to predict, in the unit of `dose_key`; None: the median dose of the screen.
    separator
        See :func:`fit_perturbation`.
    model
        A model as for :func:`fit_perturbation`; or one that was fitted, or its folder: then nothing is fitted.
    residual, loss, strategy, max_epochs, patience, minutes, batch_size, learning_rate
        Of the fit, see :func:`fit_perturbation`.
    n_cells
        Cells predicted of each condition; where a group has fewer control cells, as many as it has.
    layer, use_raw, input, gene_ids, duplicates
        What to read, as for :func:`embed`.
    rng
        Seed of the fit and of the choice of control cells; None takes `scdiva.settings.seed`.
    device
        Torch device; None takes `scdiva.settings.device`.

    Returns
    -------
    AnnData of the predicted cells × all genes of `adata`. A condition is a perturbation, in a group and at a dose if
    there are any.

    `X`
        float32, log1p of counts per ten thousand.
    `obs`
        `perturbation_key` and `groupby` (categorical), `dose_key`, `"scdiva_condition"`, `"scdiva_control_cell"`.
    `varm["scdiva_mean"]`, `varm["scdiva_sd"]`, `varm["scdiva_control"]`
        float32 `(n_vars, n_conditions)`: predicted mean; its standard deviation, from what the screen tells (the
        network adds none; NaN where the mean is a baseline's); mean of the control cells.
    `varm["scdiva_baseline_" + name]`
        The same for each baseline; NaN where it is not defined.
    `uns["scdiva"]["perturbation"]`
        Of each condition: `condition`, `perturbation`, `group`, `dose`, `n_parts`, `n_seen` (how many of its parts
        were measured alone), `trained` (whether it was measured), `base` (what the network is added to). Of the fit:
        `validation`, `network`, `history`, `strategy`, `seed`, `seconds`, and `trained_on_interventions`, True.

    Raises
    ------
    KeyError
        If a column or layer does not exist.
    ValueError
        As :func:`fit_perturbation`; if a perturbation is neither known to the model nor measured, a group has no
        control cells, genes of the screen are missing, or an argument is out of range.
    TypeError
        If `adata` is no AnnData object.

    Examples
    --------
    >>> import scdiva as sd
    >>> screen = sd.datasets.toy(120, 100)
    >>> screen.obs["perturbation"] = ["control", "A", "B", "A+B", "C", "B+C"] * 20
    >>> train = screen[screen.obs["perturbation"] != "A+B"].copy()
    >>> predicted = sd.tl.predict_perturbation(train, "perturbation", predict=["A+B"], strategy="none")
    >>> sorted(predicted.varm)[:3]
    ['scdiva_baseline_additive', 'scdiva_baseline_elsewhere', 'scdiva_baseline_linear']
    """
    from scdiva.models.perturbation import PerturbationModel, is_perturbation_model, load_perturbation_model

    check_anndata(adata)
    if operator.index(n_cells) < 1:
        raise ValueError(f"n_cells must be at least 1, got {n_cells}.")
    reading: dict[str, Any] = {
        "layer": layer,
        "use_raw": use_raw,
        "input": input,
        "gene_ids": gene_ids,
        "duplicates": duplicates,
    }
    fitted: PerturbationModel | None = None
    if isinstance(model, PerturbationModel):
        fitted = model
    elif isinstance(model, str | PathLike) and not str(model).startswith("hf://") and is_perturbation_model(model):
        fitted = load_perturbation_model(model, device=device)
    if fitted is not None:
        given = {
            "perturbation_key": perturbation_key,
            "groupby": groupby,
            "dose_key": dose_key,
            "control": None if control == "control" else control,  # as it stands by default, it was not given
            "separator": None if separator == "+" else separator,
        }
        told = [name for name, value in given.items() if value is not None and value != getattr(fitted, name)]
        if told:
            raise ValueError(
                f"this model was fitted with {told[0]}={getattr(fitted, told[0])!r}, not {given[told[0]]!r}: leave it "
                "out, or name a model to fit one."
            )
    elif perturbation_key is None:
        raise ValueError("Name the column with the perturbations, perturbation_key, or a fitted model as model=.")
    else:
        fitted = fit_perturbation(
            adata, perturbation_key, control, groupby=groupby, dose_key=dose_key, separator=separator,
            model=cast("ScDiVa | str | PathLike[str]", model), residual=residual, loss=loss, strategy=strategy,
            max_epochs=max_epochs, patience=patience, minutes=minutes, batch_size=batch_size,
            learning_rate=learning_rate, **reading, rng=rng, device=device,
        )  # fmt: skip
    asked = Asked.of(fitted, predict, groups, dose)
    refuse_unknown(asked.parts, fitted.screen, fitted.model)
    target = settings.resolve_device(device)
    chosen, group = _control_cells(adata, fitted)
    check_genes(adata.raw.var_names if use_raw and adata.raw is not None else adata.var_names)
    controls = read_controls(adata, chosen, group, fitted.model, target, **reading)
    return predicted_cells(adata, fitted, asked, controls, n_cells, rng, target, use_raw=use_raw)


def _control_cells(adata: AnnData, fitted: PerturbationModel) -> tuple[np.ndarray, np.ndarray]:
    """Return which cells are control cells, and the group of every cell."""
    key = fitted.groupby
    group = column(adata, key).astype(object) if key else np.full(adata.n_obs, "", dtype=object)
    if fitted.perturbation_key not in adata.obs:
        return np.ones(adata.n_obs, dtype=bool), group
    done = perturbations(adata, fitted.perturbation_key, fitted.control, fitted.separator)
    return done.is_control, group


def _check(residual: str | None, loss: str, strategy: str, minutes: float | None, learning_rate: float) -> None:
    for name, value, choices in (
        ("residual", residual, ("auto", "expected", *C.BASELINES, None)),
        ("loss", loss, ("wmse", "de", "mse")),
        ("strategy", strategy, ("auto", "none", "head", "lora", "full")),
    ):
        if value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}; got {value!r}.")
    if residual is None and strategy == "none":
        raise ValueError('residual=None leaves the prediction to the network, and strategy="none" does without one.')
    if minutes is not None and not 0 < minutes < np.inf:
        raise ValueError(f"minutes must be a number above 0, or None for no limit; got {minutes!r}.")
    if not 0 < learning_rate < np.inf:
        raise ValueError(f"learning_rate must be a number above 0, got {learning_rate!r}.")
