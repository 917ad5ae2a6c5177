"""`tl.fit_perturbation`, `predict_...`, `score_...` and `rank_perturbations`: open, run, write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import pandas as pd

from scdiva import _constants as C
from scdiva._checks import check_arguments, check_choices, check_least
from scdiva._docs import with_shared_docs
from scdiva._rng import seed_of
from scdiva._settings import settings
from scdiva.data.options import InputOptions, Species
from scdiva.data.results import check_anndata, check_writable, noted
from scdiva.metrics import discrimination, perturbation_response
from scdiva.perturbation.predictions import (
    REFERENCES,
    Responses,
    observed_responses,
    read_prediction,
    response_score,
    stored_prediction,
)

if TYPE_CHECKING:
    import torch
    from anndata import AnnData

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
    gene_ids: str | None = None,
    species: Species = None,
    duplicates: Literal["sum", "error"] = "sum",
    rng: int | np.random.Generator | torch.Generator | None = None,
    device: str | None = None,
) -> PerturbationModel:
    r"""Fit a model on a perturbation screen: perturbed cells, and control cells beside them.

    What is predicted is an expected response, a Gaussian process over conditions in which effects of genes add up and
    carry over to similar genes and similar groups of cells (:mod:`scdiva.perturbation.response`). Where one of the
    simple baselines (:func:`scdiva.perturbation.response.baselines`) predicts conditions that are left out clearly
    better, that is taken, chosen apart for single perturbations, combinations and new groups. What was measured gets
    the expected response. The transformer is not used.

    With `finetune=True` all weights of the model are trained instead, as in the paper. The transformer reads a control
    cell with the perturbed genes in front, their values masked, and a response head on its output predicts the change
    of all genes of the screen. The loss is the squared error of the change, weighted by the genes' mean expression in
    control cells (the paper's signal-weighted MSE, :class:`scdiva.perturbation.finetune.ResponseObjective`). What is
    predicted is the mean over up to 64 control cells of the group. An epoch draws 64 control cells for each measured
    condition. The head starts at the mean change of single perturbations, and the effects of several parts add up at
    first.

    Parameters
    ----------
    adata
        Cells × genes, perturbed and control cells, raw counts or log-normalised expression; not changed. Each cell is
        normalised to ten thousand counts over all of these genes, also where its logarithms have another total.
    perturbation_key
        Column of `adata.obs` with the perturbation of each cell: a gene, a label such as a drug, or several of them.
    control
        Label of the control cells, or several labels: `["control", "NT1", "NT2"]`. In combinations (`"A+control"`) it
        is ignored. Other labels of negative controls (`NT2`, `NTC_3`, `non-targeting_00013`, `safe-targeting`,
        `neg_ctrl`, `scramble`, `INTERGENIC12`, `unperturbed`) raise an error unless they are listed here or kept by
        `guides`; the gene symbol `CTRL` brings a warning. Other kinds of controls (`AAVS1`, `GFP`, `DMSO`) are not
        recognised.
    groupby
        Column with groups of cells, such as cell types or lines; changes are those from control cells of the same
        group.
    dose_key
        Column with the dose of each perturbed cell, in any unit.
    separator
        What stands between the parts of a combination; `""` if there are none. A gene whose name contains it
        (`HLA-DRA` with `"-"`) is one part.
    guides
        Mapping of guides to genes, or to combinations of genes, if the column contains guides: `{"KLF1g1": "KLF1"}`.
        Guides are not recognised automatically: a guide that is not mapped is a perturbation of its own, and
        `fitted.notes["labels"]` lists all perturbations that are not genes. `{"NTC_1": "control"}` maps a guide to the
        control, and `{"NT1": "NT1"}` keeps a label that looks like a control as a perturbation. An empty mapping keeps
        all labels.
    model
        A loaded model, a model folder, the name of a bundled model, or `"hf://owner/name"`; not changed.
    %(finetuning)s
    %(reading)s
    rng
        Seed of the conditions that are left out, and of fine-tuning; None takes `scdiva.settings.seed`. On a CPU the
        same seed gives the same result.
    device
        Torch device; None takes `scdiva.settings.device`.

    Returns
    -------
    The fitted model, for `tl.predict_perturbation(adata, model=fitted)` and `tl.rank_perturbations`;
    `fitted.save(folder)` keeps it. `fitted.notes["validation"]` holds how well each baseline and the expected response
    predict conditions that are left out (Pearson correlation and mean squared error of the change); of a fine-tuned
    model also `fitted.notes["loss"]`, the loss of every step. A fine-tuned model is not validated this way: hold
    conditions out (:func:`scdiva.pp.split_perturbations`) and compare it with the baselines.

    Raises
    ------
    KeyError
        If a column or layer does not exist.
    ValueError
        If there are no control cells (in a group), or nothing else; if a name or dose is missing or makes no sense; if
        two labels are names of one gene (KLF1 and EKLF) and `guides` neither joins them nor keeps them apart; if labels
        look like controls that `control` lacks; if genes repeat a name, or the matrix is refused as by
        :func:`embed`; if a fine-tuning argument is given without `finetune=True` or is out of range, or
        `checkpoint_dir` holds another run.
    TypeError
        If `adata` is no AnnData object.
    FloatingPointError
        If the loss of fine-tuning becomes NaN or infinite.

    Warns
    -----
    UserWarning
        If a condition was measured in one cell, there is only one condition, or a gene symbol looks like a control.

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
    from scdiva.perturbation.model import finetuning, fit, open_screen

    check_anndata(adata)
    reading = InputOptions(layer, use_raw, input, gene_ids, species, duplicates)
    where, seed = settings.resolve_device(device), seed_of(rng)
    columns = perturbation_key, control, groupby, dose_key, separator
    opened, number = open_screen(adata, columns, guides, model, where, reading)
    tuning = finetuning(
        opened, finetune, epochs=epochs, lr=lr, freeze=freeze, lora=lora, context=context, checkpoint_dir=checkpoint_dir
    )
    return fit(adata, opened, number, where, reading, seed, tuning, checkpoint_dir)[0]


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
    gene_ids: str | None = None,
    species: Species = None,
    duplicates: Literal["sum", "error"] = "sum",
    rng: int | np.random.Generator | torch.Generator | None = None,
    device: str | None = None,
) -> AnnData:
    """Predict cells under perturbations: of single genes, of several, of genes never perturbed, in new groups of cells.

    Fits a model on the screen in `adata` (:func:`fit_perturbation`), unless a fitted one is given, and predicts what
    each perturbation makes of control cells. The predicted means and changes are written into `adata`, with what simple
    baselines predict beside them, so that they can be held against these (:func:`score_perturbation`,
    `scdiva.get.perturbation_df`, `scdiva.pl.perturbation`). The predicted cells, which differ from each other as cells
    do, are returned.

    A predicted cell is a control cell with the change of its group's mean. A gene's mean changes by the number of cells
    that express it, and by how much these do (:func:`scdiva.perturbation.predict.shift_cells`). Whichever control cells
    were drawn, the cells of a condition have the predicted mean: it less the mean of all control cells of the group is
    the predicted change.

    Parameters
    ----------
    adata
        Cells × genes, raw counts or log-normalised expression; only `uns[key_added]` is written. With a fitted model
        only its control cells count; all cells do if it has no column `perturbation_key`.
    perturbation_key, control
        The study design, see :func:`fit_perturbation`. Left out with a fitted model, which knows it.
    predict
        Perturbations, such as `["KLF1", "KLF1+TGFBR2"]`; genes of the model's vocabulary, and labels that the screen
        holds. Another name of a gene that was measured (an alias, an Ensembl id, the human symbol in a mouse screen) is
        read as the gene measured; results keep the name that you ask for. None: all that were measured.
    groupby
        Column with groups of cells, see :func:`fit_perturbation`.
    groups
        Groups in which to predict; None: all that have control cells.
    dose_key
        Column with doses, see :func:`fit_perturbation`.
    dose
        Doses at which to predict, in the unit of `dose_key`; None: the median dose of the screen.
    separator, guides
        See :func:`fit_perturbation`.
    model
        A model as for :func:`fit_perturbation`; or one that was fitted, or its folder: then nothing is fitted.
    %(finetuning)s
    n_cells
        Cells predicted of each condition; where a group has fewer control cells, as many as it has. The mean is the
        same for any number; what more cells add is how they spread: on Norman's screen the standard deviations of genes
        correlate with those of the observed cells by .93 with 25 cells, .96 with 50 and .96 with 100.
    key_added
        Key of `adata.uns` to write; a prediction that stands there is replaced.
    %(reading)s
    rng
        Seed of the fit and of the choice of control cells; None takes `scdiva.settings.seed`.
    device
        Torch device; None takes `scdiva.settings.device`.

    Returns
    -------
    AnnData of the predicted cells × all genes of `adata`. A condition is a perturbation, in a group and at a dose if
    there are any. Written into `adata` is

    `adata.uns[key_added]`
        `genes`, the names of the genes; `mean`, `change`, `sd`, `control_mean`, float32 `(n_conditions, n_genes)`:
        predicted mean, its difference to the control cells' mean, its standard deviation, and that mean;
        `baselines`, the means that each baseline predicts, by name, with a fine-tuned model among them `expected`, the
        expected response; and all that stands below in `uns["scdiva"]["perturbation"]`. h5ad and zarr hold it.

    and of the predicted cells, returned, are

    `X`
        float32, log1p of counts per ten thousand.
    `obs`
        `perturbation_key` and `groupby` (categorical), `dose_key`, `"scdiva_condition"`, `"scdiva_control_cell"`.
    `varm["scdiva_mean"]`, `varm["scdiva_sd"]`, `varm["scdiva_control"]`
        float32 `(n_vars, n_conditions)`: predicted mean; its standard deviation, from what the screen tells (NaN
        where the mean is a baseline's or a fine-tuned model's); mean of the control cells.
    `varm["scdiva_baseline_" + name]`
        The same for each baseline; NaN where it is not defined.
    `uns["scdiva"]["perturbation"]`
        Of each condition: `condition`, `perturbation`, `group`, `dose`, `n_parts`, `n_seen` (how many of its parts
        were measured alone), `trained` (whether it was measured), `base` (what it is predicted by: `"expected"`, a
        baseline, or `"finetuned"`). Of the fit: `validation`, `labels`, `seed`, `seconds`; of fine-tuning `loss`.

    Raises
    ------
    KeyError
        If a column or layer does not exist.
    ValueError
        As :func:`fit_perturbation`; if fine-tuning arguments are given with a fitted model; if a perturbation is
        neither known to the model nor measured, or names a part twice; if a group has no control cells, genes of the
        screen are missing, or an argument is out of range; if `adata.uns[key_added]` holds what scdiva did not write,
        or `adata` is a backed view, which can't be written.
    TypeError
        If `adata` is no AnnData object.
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
    from scdiva.models._fitted import given_fitted
    from scdiva.perturbation.model import PerturbationModel, control_cells, finetuning, fit, open_screen
    from scdiva.perturbation.predict import predicted_cells, requested
    from scdiva.perturbation.screen import read_controls

    check_writable(adata, call="tl.predict_perturbation", uns=[key_added])
    check_least(n_cells=(n_cells, 1))
    reading = InputOptions(layer, use_raw, input, gene_ids, species, duplicates)
    where, seed = settings.resolve_device(device), seed_of(rng)
    columns = perturbation_key, control, groupby, dose_key, separator
    tuned: dict[str, Any] = {"epochs": epochs, "lr": lr, "freeze": freeze, "lora": lora, "context": context}
    tuned["checkpoint_dir"] = checkpoint_dir
    fitted = given_fitted(PerturbationModel, model, device)
    if fitted is not None:
        if named := [name for name, value in {"finetune": finetune or None, **tuned}.items() if value is not None]:
            raise ValueError(
                f"{', '.join(named)} set how a model is fine-tuned, and this model is fitted: leave them out, or pass "
                f"the model to fine-tune, such as model={C.DEFAULT_MODEL!r}."
            )
        fitted.check_columns(columns)
        rows, group = control_cells(adata, fitted, guides, reading.species)
        targets = requested(fitted, adata, reading, group, predict, groups, dose)
        controls = read_controls(adata, rows, group, fitted.model, where, reading)
    else:
        opened, number = open_screen(adata, columns, guides, cast("ScDiVa | str", model), where, reading)
        tuning = finetuning(opened, finetune, **tuned)
        targets = requested(opened, adata, reading, opened.screen.groups, predict, groups, dose)
        fitted, controls = fit(adata, opened, number, where, reading, seed, tuning, checkpoint_dir)
    result = predicted_cells(fitted, targets, controls, n_cells, seed)
    adata.uns[key_added] = stored_prediction(result)
    adata.uns[C.UNS] = noted(adata, "tl.predict_perturbation", None, uns=[key_added])
    return result


@check_arguments
def score_perturbation(
    predicted: AnnData,
    observed: AnnData,
    *,
    layer: str | None = None,
    use_raw: bool = False,
    input: Literal["auto", "counts", "lognorm"] = "auto",
    metric: Literal["l1", "l2", "cosine"] = "l1",
    key: str = C.PREDICTED,
) -> pd.DataFrame:
    """Score predicted responses to perturbations against cells that had them, and the simple baselines the same way.

    Conditions are matched by perturbation, and by group and dose where the prediction has them; genes by name. Those
    that only one of the two has are left out. A perturbed gene is the same by any of its names: symbol, alias, Ensembl
    id.

    Parameters
    ----------
    predicted
        What :func:`predict_perturbation` returned, or the adata that was given to it.
    observed
        Perturbed cells and, of each group, control cells; all columns of `obs` that the prediction was made by. The
        data it was fitted on may be passed whole: `trained` tells which conditions were fitted.
    layer, use_raw, input
        What to read of `observed`, as for :func:`embed`: counts, or log1p of counts scaled per cell, to any total.
        Cells are normalised to ten thousand counts over all genes of `observed`.
    metric
        Distance by which `discrimination` ranks conditions.
    key
        Of the adata that was given, the entry of `uns` with the prediction: the `key_added` of the call.

    Returns
    -------
    One row for each method, condition and reference:

    `method`
        `"scdiva"`, and each baseline that is defined for any condition; with a fine-tuned model also `"expected"`, the
        expected response, which is what the same call predicts without fine-tuning where no baseline is better.
    `condition`, `perturbation`, `group`, `n_parts`, `n_seen`, `trained`
        As in the prediction.
    `n_cells`
        Cells observed.
    `reference`
        What changes are measured from: `"control"`, the observed control cells of the group; or `"mean"`, the mean of
        training perturbations (of the group, where that baseline is defined), which leaves what is particular to this
        perturbation.
    `pearson_delta`, `mse`, `wmse`, `sign_accuracy`
        See :func:`scdiva.metrics.perturbation_response`; the WMSE weighs genes by their mean in control cells.
    `pearson_delta_top20`, `mse_top20`, `hit_rate_20`; `pearson_delta_top100`, `mse_top100`, `hit_rate_100`
        The same for the genes of the largest Welch t: against the control cells; or against the mean, with the spread
        of control cells. Of a single cell, for those that change most. The sign accuracy is that of the first 20.
    `discrimination`
        Rank of the true condition among the observed ones of the group (:func:`scdiva.metrics.discrimination`).

    What is not defined is NaN: a baseline's scores where it predicts nothing, discrimination of a single condition.

    Raises
    ------
    KeyError
        If `predicted` is no prediction, or `observed` lacks a column or layer.
    ValueError
        If they have no gene or no condition in common, genes bear one name, a label is missing, or a group observed
        has no control cells; if the control cells of the two are on different scales; or if the matrix is refused as
        by :func:`embed`.

    Warns
    -----
    UserWarning
        If only some genes of the prediction were observed, or a perturbed gene was observed under two names.

    Examples
    --------
    >>> import scdiva as sd
    >>> screen = sd.datasets.toy(120, 100)
    >>> screen.obs["perturbation"] = ["control", "A", "B", "A+B", "C", "B+C"] * 20
    >>> train = screen[screen.obs["perturbation"] != "A+B"].copy()
    >>> predicted = sd.tl.predict_perturbation(train, "perturbation", predict=["A+B"])
    >>> scores = sd.tl.score_perturbation(predicted, screen)
    >>> sorted(set(scores["method"]))[:2]
    ['additive', 'linear']
    """
    check_anndata(observed)
    check_choices(metric=(metric, ("l1", "l2", "cosine")))
    found = observed_responses(read_prediction(predicted, key), observed, layer=layer, use_raw=use_raw, input=input)
    among = _discrimination(found, metric)
    de_score = {(at, kind): response_score(found, at, kind) for at in found.perturbed for kind in REFERENCES}
    rows, ranks = [], []
    for method, mean in found.means.items():
        for at, cells in found.perturbed.items():
            for reference in REFERENCES:
                start, scores = found.reference(at, reference), {}
                if start is not None and method in found.methods(at):
                    weights = found.control_of(at).mean
                    scores = perturbation_response(
                        mean[:, at], cells.mean, start, de_score=de_score[at, reference], weights=weights
                    )
                about = found.conditions.loc[at, ["condition", "perturbation", "group", "n_parts", "n_seen", "trained"]]
                rows.append({"method": method, **about, "n_cells": cells.n, "reference": reference, **scores})
                ranks.append(among.get((method, at, reference), np.nan))
    return pd.DataFrame(rows).assign(discrimination=ranks)  # the last column, whatever scores there are


def _discrimination(responses: Responses, metric: Literal["l1", "l2", "cosine"]) -> dict[tuple[str, int, str], float]:
    """Score each observed condition among those of its group, by method, condition and reference."""
    found: dict[tuple[str, int, str], float] = {}
    groups = responses.conditions.loc[list(responses.rows), "group"]
    for _, members in groups.groupby(groups, sort=False):
        for reference in REFERENCES:
            measured_from = ((at, responses.reference(at, reference)) for at in members.index)
            starts = {at: start for at, start in measured_from if start is not None}
            if not starts:
                continue
            rows, start = list(starts), np.stack(list(starts.values()))
            observed = np.stack([responses.perturbed[at].mean for at in rows]) - start
            for method, mean in responses.means.items():
                change = mean[:, rows].T - start
                defined = np.asarray(np.isfinite(change).all(axis=1))
                scores = discrimination(np.where(defined[:, None], change, 0.0), observed, metric=metric)
                for at, score, known in zip(rows, scores, defined, strict=True):
                    found[method, at, reference] = float(score) if known else np.nan
    return found


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
    gene_ids: str | None = None,
    species: Species = None,
    duplicates: Literal["sum", "error"] = "sum",
    device: str | None = None,
) -> pd.DataFrame:
    """Rank perturbations by how near they would bring the cells of one group to those of another.

    The change that is needed is the difference of the two groups' mean expression; each candidate's change is predicted
    for the cells of `start` by a model fitted on a screen (:func:`fit_perturbation`), and held against it. A fine-tuned
    model runs its transformer on up to 64 cells for each candidate.

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
    >>> fitted = sd.tl.fit_perturbation(screen, "perturbation")
    >>> ranking = sd.tl.rank_perturbations(screen, "state", "now", target="wanted", model=fitted)
    >>> sorted(ranking.index) if ranking.index.dtype == object else len(ranking)
    5
    """
    from scdiva.models._fitted import load_fitted
    from scdiva.perturbation.model import PerturbationModel
    from scdiva.perturbation.predict import ranked

    check_writable(adata, call="tl.rank_perturbations", uns=[key_added])
    fitted = load_fitted(PerturbationModel, model, device) if isinstance(model, str | PathLike) else model
    if not isinstance(fitted, PerturbationModel):
        raise TypeError(f"model must be what scdiva.tl.fit_perturbation returns, got {type(model).__name__}.")
    reading = InputOptions(layer, use_raw, input, gene_ids, species, duplicates)
    where = settings.resolve_device(device)
    frame = ranked(adata, state_key, start, target, fitted, candidates, combinations, dose, where, reading)
    columns = {str(name): np.asarray(frame[name]) for name in frame}
    columns["perturbation"] = np.array(frame["perturbation"].tolist(), dtype=object)
    adata.uns[key_added] = {**columns, "state_key": str(state_key), "start": str(start), "target": str(target)}
    adata.uns[C.UNS] = noted(adata, "tl.rank_perturbations", None, uns=[key_added])
    return frame
