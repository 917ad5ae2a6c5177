"""Public calls on perturbation screens: fit a model, predict, rank perturbations, and split the conditions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import pandas as pd

from scdiva import _constants as C
from scdiva._checks import check_arguments, check_choices, check_least
from scdiva._docs import with_shared_docs
from scdiva._labels import read_labels
from scdiva._rng import seed_of
from scdiva._settings import settings
from scdiva.data.genes import input_options
from scdiva.data.results import check_anndata, check_columns, check_key, check_writable, noted, write
from scdiva.perturbation.conditions import Perturbations, ScreenDesign, read_perturbations
from scdiva.perturbation.scores import stored_prediction
from scdiva.tokenizer.vocabulary import load_vocabulary

if TYPE_CHECKING:
    import torch
    from anndata import AnnData
    from numpy.typing import NDArray

    from scdiva.models import PerturbationModel, ScDiVa


@check_arguments
@with_shared_docs
def fit_perturbation(
    adata: AnnData,
    perturbation_key: str,
    control: Sequence[str] | str = "control",
    *,
    groupby: str | None = None,
    dose_key: str | None = None,
    separator: str = "+",
    guides: Mapping[str, str] | None = None,
    model: ScDiVa | str | PathLike[str] = C.DEFAULT_MODEL,
    finetune: bool = False,
    epochs: int | None = None,
    lr: float | None = None,
    freeze: int | None = None,
    lora: int | None = None,
    context: int | None = None,
    checkpoint_dir: str | PathLike[str] | None = None,
    layer: str | None = None,
    use_raw: bool = False,
    input: Literal["auto", "counts", "lognorm"] = "auto",
    rng: int | np.random.Generator | torch.Generator | None = None,
    device: str | None = None,
) -> PerturbationModel:
    r"""Fit a model on a perturbation screen.

    The expected response is the posterior mean of a Gaussian process over conditions, in which the effects of genes add
    up and are shared between similar genes and similar groups of cells (:mod:`scdiva.perturbation.response`). It is
    compared with simple baselines (:func:`scdiva.perturbation.response.baselines`) by cross-validation over conditions.
    For each kind of new condition (single perturbation, combination, new group) a baseline is used instead if it is
    clearly better. Measured conditions are predicted by the expected response. The transformer is not used.

    With `finetune=True` all weights of the model are trained instead, as in the paper. The transformer reads a control
    cell with the perturbed genes first, their values masked, and a response head on its output predicts the change of
    all genes of the screen. The loss is the squared error of the change, weighted by the genes' mean expression in
    control cells (the paper's signal-weighted MSE, :class:`scdiva.perturbation.response_head.ResponseObjective`). The
    prediction is the mean over up to 64 control cells of the group. An epoch draws 64 control cells for each measured
    condition. The head is initialised with the mean change of single perturbations, and the effects of several parts
    add up before training.

    Parameters
    ----------
    %(perturbed_cells)s
    %(perturbation_key)s
    %(control)s
    %(groupby)s
    %(dose_key)s
    %(separator)s
    %(guides)s
    model
        A loaded model, a model folder, the name of a bundled model, or `"hf://owner/name"`. It is not changed.
    %(finetuning)s
    %(reading)s
    rng
        Seed of cross-validation and of fine-tuning. None: `scdiva.settings.seed`. On a CPU the same seed gives the same
        result.
    device
        Torch device. None: `scdiva.settings.device`.

    Returns
    -------
    The fitted model, for `tl.predict_perturbation(adata, model=fitted)` and `tl.rank_perturbations`;
    `fitted.save(folder)` saves it. `fitted.notes["validation"]` contains the cross-validation scores of the baselines
    and of the expected response (Pearson correlation and mean squared error of the change), `fitted.notes["labels"]`
    the perturbations that are not genes, and `fitted.notes["loss"]` the fine-tuning loss of every step. A fine-tuned
    model is not cross-validated: hold conditions out (:func:`scdiva.pp.split_perturbations`) and compare it with the
    baselines.

    Raises
    ------
    KeyError
        If a column or layer does not exist.
    ValueError
        If there are no control cells (in a group) or no perturbed cells; if a name or dose is missing or invalid; if
        two labels are names of one gene (KLF1 and EKLF) and `guides` neither joins nor keeps them; if labels look like
        controls that `control` lacks; if gene names repeat, or the matrix is not valid for :func:`embed`; if a
        fine-tuning argument is given without `finetune=True` or is out of range, or `checkpoint_dir` contains another
        run.
    TypeError
        If `adata` is not an AnnData object.
    FloatingPointError
        If the loss of fine-tuning becomes NaN or infinite.

    Warns
    -----
    UserWarning
        If a condition has one cell, there is only one condition, or a gene symbol looks like a control.

    Examples
    --------
    >>> import scdiva as sd
    >>> screen = sd.datasets.toy(120, 100)
    >>> screen.obs["perturbation"] = ["control", "A", "B", "A+B", "C", "B+C"] * 20
    >>> fitted = sd.tl.fit_perturbation(screen, "perturbation")
    >>> predicted = sd.tl.predict_perturbation(screen, model=fitted, predict=["A+C"])
    >>> set(predicted.obs["scdiva_condition"])
    {'A+C'}
    """
    from scdiva.perturbation.model import finetune_fields, fit
    from scdiva.perturbation.screen import open_screen

    check_anndata(adata)
    check_columns(perturbation_key, groupby, dose_key)
    reading = input_options(adata, layer, use_raw, input)
    torch_device, seed = settings.resolve_device(device), seed_of(rng)
    design = ScreenDesign.of(perturbation_key, control, groupby, dose_key, separator)
    opened = open_screen(adata, design, guides, model, torch_device, reading)
    fields = finetune_fields(
        opened, finetune, epochs=epochs, lr=lr, freeze=freeze, lora=lora, context=context, checkpoint_dir=checkpoint_dir
    )
    return fit(adata, opened, torch_device, seed, fields, checkpoint_dir)[0]


@check_arguments
@with_shared_docs
def predict_perturbation(
    adata: AnnData,
    perturbation_key: str | None = None,
    control: Sequence[str] | str = "control",
    *,
    predict: Sequence[str] | str | None = None,
    groupby: str | None = None,
    groups: Sequence[str] | str | None = None,
    dose_key: str | None = None,
    dose: float | Sequence[float] | None = None,
    separator: str = "+",
    guides: Mapping[str, str] | None = None,
    model: PerturbationModel | ScDiVa | str | PathLike[str] = C.DEFAULT_MODEL,
    finetune: bool = False,
    epochs: int | None = None,
    lr: float | None = None,
    freeze: int | None = None,
    lora: int | None = None,
    context: int | None = None,
    checkpoint_dir: str | PathLike[str] | None = None,
    n_cells: int = 100,
    key_added: str = C.PREDICTED,
    layer: str | None = None,
    use_raw: bool = False,
    input: Literal["auto", "counts", "lognorm"] = "auto",
    rng: int | np.random.Generator | torch.Generator | None = None,
    device: str | None = None,
) -> AnnData:
    """Predict cells under perturbations: new single perturbations, new combinations, or new groups of cells.

    A model is fitted on the screen in `adata` (:func:`fit_perturbation`) unless a fitted model is given, and the change
    of control cells is predicted for each perturbation. The predicted means and changes, and those of simple baselines,
    are written into `adata`; compare them by :func:`score_perturbation`, `scdiva.get.perturbation_df` and
    `scdiva.pl.perturbation`. The predicted cells are returned.

    A predicted cell is a control cell shifted by the change of its group's mean: a gene's mean changes by the number of
    cells that express it, and by its level in these cells (:func:`scdiva.perturbation.predict.shift_cells`). The mean
    of the predicted cells of a condition, minus the mean of all control cells of the group, is the predicted change.

    Parameters
    ----------
    adata
        Cells × genes, raw counts or log-normalised expression; only `uns[key_added]` is written. With a fitted model
        only control cells are used; all cells if `adata` has no column `perturbation_key`.
    perturbation_key, control
        See :func:`fit_perturbation`. A fitted model contains them.
    predict
        Perturbations, such as `["KLF1", "KLF1+TGFBR2"]`: genes of the model's vocabulary, and labels of the screen. A
        measured gene may have another name (an alias, an Ensembl id, the human symbol in a mouse screen); results keep
        the requested name. None: all measured perturbations.
    groupby
        See :func:`fit_perturbation`.
    groups
        Groups to predict. None: all groups with control cells.
    dose_key
        See :func:`fit_perturbation`.
    dose
        Doses to predict, in the unit of `dose_key`. None: the median dose of the screen.
    separator, guides
        See :func:`fit_perturbation`.
    model
        A model as for :func:`fit_perturbation`; or a fitted model or its folder, with which nothing is fitted.
    %(finetuning)s
    n_cells
        Maximum number of cells predicted for each condition, at most the number of control cells of the group. The mean
        does not depend on it; the spread does: on the Norman dataset the standard deviations of genes correlate with
        those of the observed cells by .93 with 25 cells, .96 with 50 and .96 with 100.
    key_added
        Key of `adata.uns` to write; an earlier prediction under this key is replaced.
    %(reading)s
    rng
        Seed of the fit and of the choice of control cells. None: `scdiva.settings.seed`.
    device
        Torch device. None: `scdiva.settings.device`.

    Returns
    -------
    AnnData of the predicted cells × all genes of the screen. A condition is a perturbation, in a group and at a dose if
    there are any. Written into `adata` is

    `adata.uns[key_added]`
        `genes`, names of the genes; `mean`, `change`, `sd`, `control_mean`, float32 `(n_conditions, n_genes)`:
        predicted mean, its difference from the mean of the control cells, its standard deviation, and the mean of the
        control cells; `baselines`, the mean predicted by each baseline, and for a fine-tuned model by `expected`, the
        expected response; and all entries of `uns["scdiva"]["perturbation"]` below. h5ad and zarr can hold it.

    The returned cells have

    `X`
        float32, log1p of counts per ten thousand.
    `obs`
        `perturbation_key` and `groupby` (categorical), `dose_key`, `"scdiva_condition"`, `"scdiva_control_cell"`.
    `varm["scdiva_mean"]`, `varm["scdiva_sd"]`, `varm["scdiva_control"]`
        float32 `(n_vars, n_conditions)`: predicted mean; its standard deviation (NaN for a baseline or a fine-tuned
        model); mean of the control cells.
    `varm["scdiva_baseline_" + name]`
        Mean predicted by each baseline; NaN where it is not defined.
    `uns["scdiva"]["perturbation"]`
        By condition: `condition`, `perturbation`, `group`, `dose`, `n_parts`, `n_seen` (number of its parts that were
        measured alone), `trained` (whether it was measured), `base` (method: `"expected"`, a baseline, or
        `"finetuned"`). Of the fit: `validation`, `labels`, `seed`, `seconds`, and `loss` of fine-tuning.

    Raises
    ------
    KeyError
        If a column or layer does not exist.
    ValueError
        As :func:`fit_perturbation`; if fine-tuning arguments are given with a fitted model; if a perturbation is
        neither in the vocabulary nor measured, or contains a part twice; if a group has no control cells, genes of the
        screen are missing, or an argument is out of range; if `adata.uns[key_added]` was not written by scdiva, or
        `adata` is a backed view, which cannot be written.
    TypeError
        If `adata` is not an AnnData object.
    FloatingPointError
        As :func:`fit_perturbation`.

    Warns
    -----
    UserWarning
        As :func:`fit_perturbation`; and if a group has fewer than 20 control cells.

    Examples
    --------
    >>> import scdiva as sd
    >>> screen = sd.datasets.toy(120, 100)
    >>> screen.obs["perturbation"] = ["control", "A", "B", "A+B", "C", "B+C"] * 20
    >>> train = screen[screen.obs["perturbation"] != "A+B"].copy()
    >>> predicted = sd.tl.predict_perturbation(train, "perturbation", predict=["A+B"])
    >>> sorted(predicted.varm)[:3]
    ['scdiva_baseline_additive', 'scdiva_baseline_elsewhere', 'scdiva_baseline_linear']
    >>> train.uns["scdiva_perturbation"]["change"].shape
    (1, 100)
    """
    from scdiva.models.pretrained import given_fitted
    from scdiva.perturbation.model import PerturbationModel, control_cells, finetune_fields, fit
    from scdiva.perturbation.predict import find_targets, predicted_cells
    from scdiva.perturbation.screen import open_screen, read_controls

    check_writable(adata, call="tl.predict_perturbation", uns=[key_added])
    check_least(n_cells=(n_cells, 1))
    check_columns(perturbation_key, groupby, dose_key)
    reading = input_options(adata, layer, use_raw, input)
    torch_device, seed = settings.resolve_device(device), seed_of(rng)
    design = ScreenDesign.of(perturbation_key, control, groupby, dose_key, separator)
    tuning: dict[str, Any] = {"epochs": epochs, "lr": lr, "freeze": freeze, "lora": lora, "context": context}
    tuning["checkpoint_dir"] = checkpoint_dir
    fitted = given_fitted(PerturbationModel, model, device)
    if fitted is not None:
        if extra := [name for name, value in {"finetune": finetune or None, **tuning}.items() if value is not None]:
            raise ValueError(
                f"{', '.join(extra)} cannot be used with a fitted model. Omit these arguments, or pass a model to "
                f"fine-tune: model={C.DEFAULT_MODEL!r}."
            )
        fitted.check_design(design)
        rows, group = control_cells(adata, fitted, guides, reading.species)
        targets = find_targets(fitted, adata, reading, group, predict, groups, dose)
        controls = read_controls(adata, rows, group, fitted.model, torch_device, reading)
    else:
        opened = open_screen(adata, design, guides, cast("ScDiVa | str", model), torch_device, reading)
        fields = finetune_fields(opened, finetune, **tuning)
        targets = find_targets(opened, adata, reading, opened.screen.groups, predict, groups, dose)
        fitted, controls = fit(adata, opened, torch_device, seed, fields, checkpoint_dir)
    result = predicted_cells(fitted, targets, controls, n_cells, seed)
    adata.uns[key_added] = stored_prediction(result)
    adata.uns[C.UNS] = noted(adata, "tl.predict_perturbation", None, uns=[key_added])
    return result


@check_arguments
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
    key_added: str = C.RANKED,
    layer: str | None = None,
    use_raw: bool = False,
    input: Literal["auto", "counts", "lognorm"] = "auto",
    device: str | None = None,
) -> pd.DataFrame:
    """Rank perturbations by how closely they would bring the cells of one group to those of another.

    The needed change is the difference of the two groups' mean expression. The change by each candidate is predicted
    for the cells of `start` by a fitted model (:func:`fit_perturbation`) and compared with it. A fine-tuned model runs
    its transformer on up to 64 cells for each candidate.

    Parameters
    ----------
    adata
        Cells × genes, with all genes of the screen; only `uns[key_added]` is written.
    state_key
        Column of `adata.obs` with the groups.
    start, target
        Group to start from, and group to reach.
    model
        A fitted perturbation model, or its folder.
    candidates
        Perturbations to rank, such as `["KLF1", "KLF1+TGFBR2"]`. None: all measured perturbations.
    combinations
        Whether to rank also all pairs of the genes and labels that were measured alone.
    dose
        Dose of all candidates. None: the median dose of the screen.
    key_added
        Key of `adata.uns` to write; an earlier ranking under this key is replaced.
    %(reading)s
    device
        Torch device. None: `scdiva.settings.device`.

    Returns
    -------
    One row per perturbation, best first: `perturbation`, `n_parts`, `n_seen` (parts that were measured alone),
    `trained` (whether it was measured, in any group), `cosine` of predicted and needed change, by which rows are
    sorted, `reached` (predicted change projected on the needed one, as a share of its length), and `distance` to the
    target, as a share of that before the perturbation. The columns are also written into `adata.uns[key_added]`, as
    arrays, with `state_key`, `start` and `target`; h5ad and zarr can hold them.

    Raises
    ------
    KeyError
        If a column or layer does not exist.
    ValueError
        If a group does not exist, both groups are the same or have equal means, genes of the screen are missing, the
        start cells are of several groups of the screen, a candidate is unknown or named twice, combinations are
        requested without a separator, gene names repeat, or the matrix is not valid for :func:`embed`; if
        `adata.uns[key_added]` was not written by scdiva, or `adata` is a backed view.
    TypeError
        If `adata` is not an AnnData object, or the model was not fitted on a screen.

    Examples
    --------
    >>> import scdiva as sd
    >>> screen = sd.datasets.toy(120, 100)
    >>> screen.obs["perturbation"] = ["control", "A", "B", "A+B", "C", "B+C"] * 20
    >>> screen.obs["state"] = ["now", "other", "wanted"] * 40
    >>> fitted = sd.tl.fit_perturbation(screen, "perturbation")
    >>> ranking = sd.tl.rank_perturbations(screen, "state", "now", target="wanted", model=fitted)
    >>> sorted(ranking.index) if ranking.index.dtype == object else len(ranking)
    5
    """
    from scdiva.models.pretrained import load_fitted
    from scdiva.perturbation.model import PerturbationModel
    from scdiva.perturbation.predict import ranked

    check_writable(adata, call="tl.rank_perturbations", uns=[key_added])
    fitted = load_fitted(PerturbationModel, model, device) if isinstance(model, str | PathLike) else model
    if not isinstance(fitted, PerturbationModel):
        raise TypeError(f"model must be what scdiva.tl.fit_perturbation returns, got {type(model).__name__}.")
    reading = input_options(adata, layer, use_raw, input)
    torch_device = settings.resolve_device(device)
    frame = ranked(adata, state_key, start, target, fitted, candidates, combinations, dose, torch_device, reading)
    columns = {str(name): np.asarray(frame[name]) for name in frame}
    columns["perturbation"] = np.array(frame["perturbation"].tolist(), dtype=object)
    adata.uns[key_added] = {**columns, "state_key": str(state_key), "start": str(start), "target": str(target)}
    adata.uns[C.UNS] = noted(adata, "tl.rank_perturbations", None, uns=[key_added])
    return frame


@check_arguments
@with_shared_docs
def split_perturbations(
    adata: AnnData,
    perturbation_key: str,
    control: Sequence[str] | str = "control",
    *,
    by: Literal["single", "combination", "group"],
    groupby: str | None = None,
    n_splits: int = 5,
    fold: int = 0,
    separator: str = "+",
    guides: Mapping[str, str] | None = None,
    key_added: str = C.OBS_SPLIT,
    rng: int | None = None,
    copy: bool = False,
) -> AnnData | None:
    """Hold conditions of a screen out for testing: single perturbations, combinations, or a group of cells.

    The folds of one seed are disjoint, and every condition is in one of them. Control cells are always in the training
    part.

    - `"single"`: a fold of the single perturbations, and every combination that contains one of them.
    - `"combination"`: a fold of the combinations. All single perturbations are in the training part.
    - `"group"`: the perturbed cells of one group, that of number `fold` in alphabetical order. Groups without perturbed
      cells are not counted.

    Parameters
    ----------
    adata
        The cells.
    %(perturbation_key)s
    %(control)s
    by
        Kind of conditions to hold out, see above.
    groupby
        Column of `adata.obs` with the groups, for `"group"`: cell types or cell lines.
    n_splits
        Number of folds; ignored for `"group"`.
    fold
        Number of the fold to hold out, from 0.
    %(separator)s
    %(guides)s
    key_added
        Column to write.
    rng
        Seed of the folds. None: `scdiva.settings.seed`.
    copy
        Whether to write into a copy and return it.

    Returns
    -------
    None, or the copy. Written are

    `adata.obs[key_added]`
        Categorical, `"train"` or `"test"`.
    `adata.obs[key_added + "_seen"]`
        int8: for a test cell, the number of parts of its perturbation that occur alone among the training cells; -1 for
        training cells.
    `adata.uns["scdiva"][key_added]`
        `held_out` (labels of the held-out perturbations or group), and the arguments; `guides` as `label` and `gene`.

    Raises
    ------
    KeyError
        If a column does not exist.
    TypeError
        If `rng` is not an int: the folds of a generator would not be disjoint.
    ValueError
        If a label is missing or has an empty part; if there are no control cells, fewer conditions than folds, no such
        fold, or fewer than two groups with perturbed cells; if the held-out group has no control cells; if labels look
        like controls that `control` lacks, or two are names of one gene, and `guides` does not declare it; or if
        arguments exclude each other.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.toy(60)
    >>> adata.obs["perturbation"] = ["control", "A", "B", "A+B", "C", "B+C"] * 10
    >>> sd.pp.split_perturbations(adata, "perturbation", by="combination", n_splits=2)
    >>> adata.obs["scdiva_split"].value_counts().to_dict()
    {'train': 50, 'test': 10}
    """
    seen_key = f"{key_added}_{C.SEEN}"
    check_anndata(adata)
    check_key(key_added, "key_added")
    seed = _split_seed(by, groupby, n_splits, fold, rng)
    if {key_added, seen_key} & {perturbation_key, groupby}:
        raise ValueError(f"key_added={key_added!r} would overwrite what the split is made from; choose another name.")
    check_writable(adata, copy=copy, call="pp.split_perturbations", entry=key_added, obs=[key_added, seen_key])
    design = ScreenDesign.of(perturbation_key, control, separator=separator)
    cells = read_perturbations(adata, design, guides, load_vocabulary())
    if by == "group":
        test, held_out = _held_out_group(adata, cells, str(groupby), fold)
    else:
        test, held_out = _held_out_conditions(cells, by, n_splits, fold, seed, perturbation_key)
    trained = [cells.parts[code] for code in np.unique(cells.code[~test])]
    singles = {parts[0] for parts in trained if len(parts) == 1}
    n_seen = np.array([sum(part in singles for part in parts) for parts in cells.parts])
    seen = np.where(test, n_seen[cells.code], -1).astype(np.int8)
    notes = {
        "held_out": np.array(held_out, dtype=object),
        "perturbation_key": perturbation_key,
        "control": np.array(cells.design.control, dtype=object),
        "by": by,
        "groupby": groupby or "",
        "n_splits": n_splits,
        "fold": fold,
        "separator": separator,
        "seed": seed,
        **cells.notes,
    }
    part = pd.Categorical(np.where(test, "test", "train"), categories=["train", "test"])
    columns = {key_added: part, seen_key: seen}
    return write(adata, "pp.split_perturbations", key_added, notes, copy=copy, obs=columns)


def _split_seed(by: str, groupby: str | None, n_splits: int, fold: int, rng: int | None) -> int:
    """Check the arguments of a split, and return its seed."""
    check_choices(by=(by, ("single", "combination", "group")))
    if (groupby is not None) != (by == "group"):
        raise ValueError(
            f"groupby requires by='group', and by='group' requires groupby; got {groupby!r} and by={by!r}."
        )
    check_least(fold=(fold, 0))
    if by != "group":
        check_least(n_splits=(n_splits, 2))
        if fold >= n_splits:
            raise ValueError(f"there is no fold {fold}: folds go from 0 to {n_splits - 1}.")
    seed = settings.seed if rng is None else rng
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
        raise TypeError(f"rng must be an int or None, so that all folds come from one seed; got {type(rng).__name__}.")
    check_least(rng=(int(seed), 0))
    return int(seed)


def _held_out_conditions(
    cells: Perturbations, by: str, n_splits: int, fold: int, seed: int, perturbation_key: str
) -> tuple[NDArray[np.bool_], list[str]]:
    """Hold out a fold of the single perturbations and their combinations, or a fold of the combinations."""
    codes = [code for code, parts in enumerate(cells.parts) if parts and (len(parts) > 1) == (by == "combination")]
    if len(codes) < n_splits:
        first = f" (first: {cells.labels[codes[0]]!r})" if codes else ""
        kind = "single perturbations" if by == "single" else f"combinations with {cells.design.separator!r}"
        raise ValueError(
            f"adata.obs[{perturbation_key!r}] has {len(codes)} {kind}{first}, too few for {n_splits} folds."
            + (" Pass a smaller n_splits." if len(codes) > 1 else "")
        )
    order = np.random.default_rng(seed).permutation(codes)
    held_out = np.sort(np.array_split(order, n_splits)[fold])
    if by == "single":
        singles = {cells.parts[code][0] for code in held_out}
        held_out = np.array([code for code, parts in enumerate(cells.parts) if singles & set(parts)])
    return np.isin(cells.code, held_out), [cells.labels[code] for code in held_out]


def _held_out_group(
    adata: AnnData, cells: Perturbations, groupby: str, fold: int
) -> tuple[NDArray[np.bool_], list[str]]:
    """Hold out the perturbed cells of a group."""
    group = read_labels(adata, groupby)
    names = np.unique(group[~cells.is_control])
    if len(names) < 2:
        shown = f" ({str(names[0])!r})" if len(names) else ""
        raise ValueError(
            f"adata.obs[{groupby!r}] has {len(names)} groups with perturbed cells{shown}. Two or more are required: "
            "one to hold out, the others for training."
        )
    if fold >= len(names):
        raise ValueError(
            f"there is no fold {fold}: {len(names)} groups have perturbed cells, folds go from 0 to {len(names) - 1}."
        )
    name = names[fold]
    if not cells.is_control[group == name].any():
        raise ValueError(
            f"group {str(name)!r} of adata.obs[{groupby!r}] has {(group == name).sum()} cells and no control cells, "
            "from which its response could be predicted. Remove this group."
        )
    return (group == name) & ~cells.is_control, [str(name)]
