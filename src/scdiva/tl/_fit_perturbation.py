"""`tl.fit_perturbation`: a model of what perturbations change, from a screen."""

from __future__ import annotations

import operator
import time
import warnings
from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import numpy as np

from scdiva import _constants as C
from scdiva._docs import with_shared_docs
from scdiva._settings import logger, settings
from scdiva._threads import torch_threads_kept
from scdiva.data.conditions import column
from scdiva.data.guides import read_guides
from scdiva.data.reading import Reading, Species
from scdiva.data.writing import check_anndata
from scdiva.tl._notes import model_name, seed_of
from scdiva.tl._screen import Controls, read_screen, what_was_done

if TYPE_CHECKING:
    import torch
    from anndata import AnnData

    from scdiva.models import PerturbationModel, ScDiVa


class Training(NamedTuple):
    """How a network is trained, as for :func:`fit_perturbation`."""

    residual: str | None
    loss: Literal["wmse", "de", "mse"]
    strategy: Literal["auto", "none", "head", "lora", "full"]
    max_epochs: int
    patience: int
    minutes: float | None
    batch_size: int
    learning_rate: float

    def check(self) -> None:
        """Refuse what is out of range."""
        for name, value, choices in (
            ("residual", self.residual, ("auto", "expected", *C.BASELINES, None)),
            ("loss", self.loss, ("wmse", "de", "mse")),
            ("strategy", self.strategy, ("auto", "none", "head", "lora", "full")),
        ):
            if value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}; got {value!r}.")
        if self.residual is None and self.strategy == "none":
            raise ValueError(
                'residual=None leaves the prediction to the network, and strategy="none" does without one.'
            )
        if self.minutes is not None and not 0 < self.minutes < np.inf:
            raise ValueError(f"minutes must be a number above 0, or None for no limit; got {self.minutes!r}.")
        if not 0 < self.learning_rate < np.inf:
            raise ValueError(f"learning_rate must be a number above 0, got {self.learning_rate!r}.")
        for name, least in (("max_epochs", 1), ("patience", 1), ("batch_size", 2)):
            if operator.index(getattr(self, name)) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}.")


@with_shared_docs
def fit_perturbation(
    adata: AnnData,
    perturbation_key: str,
    control: str = "control",
    *,
    groupby: str | None = None,
    dose_key: str | None = None,
    separator: str = "+",
    guides: Mapping[str, str] | Literal["auto"] | None = None,
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
    species: Species = None,
    duplicates: Literal["sum", "error"] = "sum",
    rng: int | np.random.Generator | torch.Generator | None = None,
    device: str | None = None,
) -> PerturbationModel:
    r"""Fit a model on a perturbation screen: perturbed cells, and control cells beside them.

    A prediction has two parts. The first is an expected response, a Gaussian process over conditions in which effects
    of genes add up and carry over to similar genes and similar groups of cells (:mod:`scdiva.perturbation.response`),
    or, with `residual`, one of the simple baselines. The second is a network: it reads a control cell with the
    perturbed genes marked, their values hidden, in front of all others (so that they are never cut off), and predicts
    for that cell what the first part leaves of the change of every gene of `adata` (paper, section on perturbation
    prediction). It learns from conditions that the first part was fitted without, is stopped by others that are held
    out, and is dropped where these are predicted no better with it, as `notes["network"]` says. Of fewer than 20
    conditions none is trained.

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
    guides
        The gene, or combination of genes, of each guide, where the column names guides: `{"KLF1g1": "KLF1"}`; or
        `"auto"`, which takes a guide's number or prefix off (`KLF1g1`, `KLF1_2`, `sgKLF1-1`, `g1-KLF1`, `klf1`). Guides
        of the control are read as it is (`{"NTC_1": "control"}`). None: labels are as they are, and refused if most
        are no genes of the vocabulary, but are so without what guides add; an empty mapping leaves them in any case.
        Labels are no columns of the data, so that a table of `species` is not asked of them: `{"Klf1": "KLF1"}`.
    model
        A loaded model, a model folder, the name of a bundled model, or `"hf://owner/name"`; not changed.
    residual
        What the network is added to: `"expected"`, the expected response; a baseline, `"no_change"`, `"train_mean"`,
        `"matching_mean"`, `"additive"`, `"linear"` or `"elsewhere"` (:func:`scdiva.perturbation.baselines.baselines`);
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
    %(reading)s
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
        predict alone; if a name or dose is missing or makes no sense; if labels name guides, or combinations with
        another separator, and nothing was said of it; if genes repeat a name, an argument is out of range, or the
        matrix is refused as by :func:`embed`.
    TypeError
        If `adata` is no AnnData object.

    Warns
    -----
    UserWarning
        If a condition was measured in one cell, there is one condition only, or a few labels look like guides.

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
    check_anndata(adata)
    training = Training(residual, loss, strategy, max_epochs, patience, minutes, batch_size, learning_rate)
    training.check()
    reading = Reading(layer, use_raw, input, gene_ids, species, duplicates)
    opened, controls = open_screen(
        adata, perturbation_key, control, groupby, dose_key, separator, guides, model, device, reading
    )
    return trained(opened, controls, training, rng, device)


def open_screen(
    adata: AnnData,
    perturbation_key: str,
    control: str,
    groupby: str | None,
    dose_key: str | None,
    separator: str,
    guides: Mapping[str, str] | Literal["auto"] | None,
    model: ScDiVa | str | PathLike[str],
    device: str | None,
    reading: Reading,
) -> tuple[PerturbationModel, Controls]:
    """Read a screen, and load the model that is to be fitted on it.

    Parameters
    ----------
    adata, perturbation_key, control, groupby, dose_key, separator, guides, model, device
        As for :func:`fit_perturbation`.
    reading
        What to read.

    Returns
    -------
    The model before it is fitted, and the control cells.
    """
    begun = time.monotonic()
    labels = column(adata, perturbation_key, kind="perturbation", meant=(control,))

    from scdiva.models import PerturbationModel
    from scdiva.models.pretrained import load_for
    from scdiva.perturbation.model import numbered_labels
    from scdiva.perturbation.screen import KINDS

    target = settings.resolve_device(device)
    given = load_for(model, target)
    genes = read_guides(
        np.unique(labels), guides, given.vocabulary, key=perturbation_key, control=control, separator=separator,
        stacklevel=4,
    )  # fmt: skip
    done = what_was_done(adata, perturbation_key, control, groupby, dose_key, separator, genes)
    screen, controls = read_screen(adata, given, done, target, reading)
    if len(screen.conditions) == 1:
        warnings.warn(
            "the screen holds one condition: what is predicted of others is what it changed, and nothing can be said "
            "of how good that is.",
            UserWarning,
            stacklevel=3,
        )
    notes: dict[str, Any] = {
        "labels": np.array(list(numbered_labels(given, screen)), dtype=object),
        "model": model_name(model),
        "seconds": time.monotonic() - begun,
    }
    if genes:
        notes["guides"] = {
            "label": np.array(list(genes), dtype=object),
            "gene": np.array(list(genes.values()), dtype=object),
        }
    opened = PerturbationModel(
        given, screen, dict.fromkeys((*KINDS, "measured"), "expected"), None, perturbation_key, control, groupby or "",
        dose_key or "", separator, notes,
    )  # fmt: skip
    return opened, controls


def trained(
    opened: PerturbationModel,
    controls: Controls,
    training: Training,
    rng: int | np.random.Generator | torch.Generator | None,
    device: str | None,
) -> PerturbationModel:
    """Fit a model on a screen that was read.

    Parameters
    ----------
    opened, controls
        What :func:`open_screen` gave.
    training
        How.
    rng, device
        As for :func:`fit_perturbation`.
    """
    from scdiva.perturbation.screen import KINDS
    from scdiva.perturbation.training import fit_responses
    from scdiva.train.config import PerturbationConfig
    from scdiva.train.loop import Limits

    begun = time.monotonic()
    target = settings.resolve_device(device)
    seed = seed_of(rng)
    chosen = ("head" if target == "cpu" else "lora") if training.strategy == "auto" else training.strategy
    config = PerturbationConfig(
        batch_size=training.batch_size, learning_rate=training.learning_rate, seed=seed, loss=training.loss
    )
    screen = opened.screen
    logger.info(
        "fitting %d conditions of %d groups, %d genes, strategy %r; %d labels are no genes of the vocabulary",
        len(screen.conditions), len(screen.groups), len(screen.genes), chosen, len(opened.labels),
    )  # fmt: skip
    most = np.inf if training.minutes is None else 60 * training.minutes
    with torch_threads_kept(1 if target == "cpu" else None):  # products too small to share
        found = fit_responses(
            opened.model, screen, controls.cells, set(KINDS), cast("Any", chosen), training.residual, config,
            Limits(training.max_epochs, training.patience, most), device=target, progress=settings.progress,
        )  # fmt: skip
    seconds = opened.notes["seconds"] + time.monotonic() - begun
    notes = {**found.notes, **opened.notes, "seed": str(seed), "seconds": seconds}
    return replace(opened, model=found.model, base=found.base, head=found.head, notes=notes)
