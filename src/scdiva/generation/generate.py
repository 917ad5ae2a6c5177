"""New cells, drawn from a model (`tl.generate`)."""

from __future__ import annotations

import operator
import time
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Literal

import numpy as np
import pandas as pd
import scipy.sparse as sp

from scdiva import _constants as C
from scdiva._checks import check_arguments, check_choices, check_least
from scdiva._docs import with_shared_docs
from scdiva._labels import is_unknown, listed, read_labels, wanted_groups
from scdiva._rng import seed_of, step_seed
from scdiva._settings import logger, one_blas_thread, torch_threads_kept
from scdiva.data.genes import columns_of, input_options, or_in_raw
from scdiva.data.results import check_anndata, check_columns
from scdiva.models.inference import model_name, open_cells_for_model, resolve_run_config

if TYPE_CHECKING:
    import torch
    from anndata import AnnData

    from scdiva.data.cells import CellSource
    from scdiva.generation.sampling import Cell, Group
    from scdiva.models import ScDiVa


@check_arguments
@with_shared_docs
def generate(
    adata: AnnData,
    n_cells: int,
    model: ScDiVa | str | PathLike[str] = C.DEFAULT_MODEL,
    *,
    groupby: str | None = None,
    groups: str | Sequence[str] | None = None,
    between: tuple[str, str] | None = None,
    fraction: float | Sequence[float] | None = None,
    fixed: Mapping[str, float] | None = None,
    from_state: bool = True,
    prompt: Literal["genes", "state"] | None = None,
    n_steps: int | None = None,
    layer: str | None = None,
    use_raw: bool = False,
    input: Literal["auto", "counts", "lognorm"] = "auto",
    rng: int | np.random.Generator | torch.Generator | None = None,
    device: str | None = None,
    precision: Literal["auto", "fp32", "bf16"] | None = None,
) -> AnnData:
    r"""Draw new cells like those of a dataset, of its groups, or between two groups.

    For each new cell, a source cell is drawn from `adata`, and its cell state is computed. Genes and values are drawn
    given this state, with the number of genes and the depth of the source. The model's state head predicts the
    probability and the value of each gene; its predictions are corrected to the cells of `adata` gene by gene and, with
    `groupby`, group by group. Values are drawn as counts. No gene occurs twice in a cell, and no value is negative.

    Given the state and the number of genes, genes are independent and are drawn all at once. The transformer is not
    run: its step-by-step draws are much easier to distinguish from real cells (see the page on decisions).

    **A model that predicts through its transformer alone** (no state head, as in the paper, or a cell state from the
    transformer) draws by the reverse process instead (paper, algorithm "scDiVa Inference"): from masked positions at
    their ranks, in `n_steps` steps, each revealing random positions. Predicted values are expectations, so values are
    drawn around them with the standard deviation that values of the gene have around predictions in 128 cells of
    `adata`. They are then adjusted such that scores decrease with the rank, as in a serialised cell (isotonic
    regression), and rounded to counts at the depth of the source cell. `prompt` sets how the source cell, and with it
    the group, enters; unconditional cells are drawn with `from_state=False`.

    Parameters
    ----------
    adata
        Cells × genes, raw counts or log-normalised expression, from which source cells are drawn. Not changed.
    n_cells
        Number of new cells; with `groupby`, the number per group.
    %(model)s
    groupby, groups
        Column of `adata.obs`, and the groups to draw; None: all groups. A label such as `"unlabelled"`, `"unknown"` or
        `"-"` is a group only if it is named in `groups` or `between`; :func:`annotate` treats it as missing.
    between, fraction
        Two groups of `groupby`, and the position between the first (0) and the second (1): the state of a new cell is
        interpolated between a cell of each. `n_cells` cells are drawn for each of several fractions. None: 0.5.
    fixed
        Genes and their log-normalised values in every new cell, such as `{"CD3D": 2.0}`; 0: not expressed. Given the
        state, this does not change the other genes.
    from_state
        False: no state is given. Genes are revealed in eight steps (reverse process; paper, algorithm "scDiVa
        Inference"), and in each the state is computed from the genes revealed so far, at first the fixed ones. Only the
        number of genes and the depth come from the source cell. Without a state head, cells are drawn from fully masked
        positions.
    prompt
        How a model without a state head is conditioned on the source cell. `"genes"` (default): a random 30% of the
        source's genes stay visible at their ranks with their values, and the rest is generated (in-painting), which is
        what the model was trained for. 30% of the new cell is thus a copy, and in a weakly trained model it carries
        most of the information on the group. `"state"`: the source's cell state is added to the input embedding of
        `[LAT]`, and nothing is visible. The paper's objective does not train this input: with `anchor="learned"` it
        made predictions worse in our measurements (see the page on decisions), so use it only for a model
        whose `[LAT]` starts from a state (`anchor="encoder"`). Between two groups, visible genes come from both cells,
        or the states are interpolated.
    n_steps
        Number of steps in which genes are revealed. None: 32 for a model without a state head; 8 with a state head and
        `from_state=False`.
    %(reading)s
    rng
        Seed, or a generator. None: `scdiva.settings.seed`. A new cell depends on the seed and its number, not on the
        number of threads.
    %(device)s

    Returns
    -------
    AnnData of the new cells and those genes of `adata` that the model knows, for use with scanpy: `X`, CSR float32,
    log-normalised (to 10,000 per cell over all genes of `adata`, log1p); `layers["counts"]`, the drawn counts;
    `obs[groupby]`, `obs["scdiva_fraction"]` between groups, and `obs["scdiva_source"]`, the name of the source cell;
    `var` of `adata`; the parameters in `uns["scdiva"]["generate"]`.

    Raises
    ------
    ValueError
        If an argument is out of range, a group or a fixed gene does not exist, a group has no cell with a known gene,
        fewer than 20 cells have one, `fixed` leaves no genes to draw, `prompt` or `n_steps` does not apply to the
        model, or the matrix is not valid for :func:`embed`.
    KeyError
        If `groupby` is not a column of `adata.obs`.
    TypeError
        If `adata` is not an AnnData object.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.toy(60, 100)
    >>> made = sd.tl.generate(adata, 5, groupby="cell_type")
    >>> made.n_obs, made.layers["counts"].shape
    (20, (20, 89))
    """
    check_anndata(adata)
    start_time = time.monotonic()
    check_least(n_cells=(n_cells, 1), n_steps=(1 if n_steps is None else n_steps, 1))
    n_cells = operator.index(n_cells)
    group, groups_to_draw = _groups(adata, groupby, groups, between, fraction)
    reading = input_options(adata, layer, use_raw, input)
    names = reading.var(adata).index
    if absent := [name for name in fixed or {} if name not in names]:
        raise ValueError(f"{absent[0]!r} of fixed is not a gene of adata{or_in_raw(adata, absent[0], use_raw)}.")
    if device is not None or precision is not None:
        resolve_run_config(None, device, precision)  # invalid arguments raise before anything is read

    from scdiva.data.batch import read_cells
    from scdiva.generation import sampling
    from scdiva.generation.state_head import fit_state_head, on_cpu, states_of
    from scdiva.models.pretrained import load_for

    seed = seed_of(rng)
    loaded = load_for(model, "cpu")
    by_transformer = loaded.config.by_transformer
    _check_options(by_transformer, from_state, prompt, n_steps)
    run_config = resolve_run_config(None, *((device, precision) if by_transformer else ("cpu", "fp32")))
    _, source, parameters = open_cells_for_model(loaded, adata, run_config, reading, empty="nan")
    max_length = None if from_state and not by_transformer else loaded.config.max_length
    fixed_values = _fixed_tokens(fixed or {}, source, max_length)
    draw = np.random.default_rng(step_seed(seed, 0, "generate"))
    with torch_threads_kept(1):  # matrix products are too small for several threads
        cells, rows = read_cells(source, np.zeros(adata.n_obs, dtype=np.int64), all_genes=True, trains=False)
    if by_transformer:
        n_steps = n_steps or sampling.STEPS_TRANSFORMER
        prompt = (prompt or "genes") if from_state else None
        sources = sampling.choose_sources(groups_to_draw, n_cells, rows, seed, draw)
        new_cells = sampling.draw_by_transformer(
            loaded, cells, sources, fixed_values, prompt, n_steps, seed, run_config
        )
    else:
        n_steps = n_steps or sampling.STEPS_STATE_HEAD
        with on_cpu(loaded):
            with torch_threads_kept(1), one_blas_thread():
                states = states_of(loaded, cells)
                if group is not None:
                    of_cell = group[rows]
                    states = states._replace(group=(of_cell[:, None] == np.unique(of_cell)).astype(np.float32))
                fitted = fit_state_head(loaded, cells, states, draw)
            sources = sampling.choose_sources(groups_to_draw, n_cells, rows, seed, draw)
            new_cells = sampling.draw_by_state_head(
                fitted, cells, states, sources, fixed_values, from_state, seed, n_steps
            )
    group_names = np.repeat([one.name for one in groups_to_draw], n_cells)
    obs = pd.DataFrame(index=[f"generated_{number}" for number in range(len(new_cells))])
    obs[C.OBS_SOURCE] = adata.obs_names.to_numpy()[rows[sources.depth]]
    if groupby is not None:
        obs[groupby] = pd.Categorical(group_names)
        if between is None and isinstance(adata.obs[groupby].dtype, pd.CategoricalDtype):
            ordered = [str(name) for name in adata.obs[groupby].cat.categories if str(name) in set(group_names)]
            obs[groupby] = obs[groupby].cat.reorder_categories(ordered)
    if between is not None:
        obs[C.OBS_FRACTION] = sources.fraction
    result = _as_anndata(new_cells, obs, source)
    result.uns[C.UNS] = {
        C.GENERATE: {
            **parameters,
            "model": model_name(model),
            "groupby": groupby or "",
            "groups": np.array(list(dict.fromkeys(group_names.tolist())) if groupby else [], dtype=object),
            "fraction": np.array([one.fraction for one in groups_to_draw] if between is not None else [], dtype=float),
            "from_state": bool(from_state),
            "prompt": prompt or "",
            "n_steps": int(n_steps) if by_transformer or not from_state else 1,
            # as two arrays, because a gene name may not be a valid key
            "fixed": {"gene": np.array([*fixed], dtype=object), "value": np.array([*fixed.values()], float)}
            if fixed
            else {},
            "seed": str(seed),
            "seconds": time.monotonic() - start_time,
        }
    }
    logger.info("drew %d cells in %.0f s", result.n_obs, time.monotonic() - start_time)
    return result


def _check_options(by_transformer: bool, from_state: bool, prompt: str | None, n_steps: int | None) -> None:
    if prompt is not None:
        check_choices(prompt=(prompt, ("genes", "state")))
        if not by_transformer or not from_state:
            why = "from_state=False gives no source" if by_transformer else "a model with a state head reads its state"
            raise ValueError(f"prompt sets how a new cell is conditioned on its source, but {why}: leave out prompt.")
    if n_steps is not None and from_state and not by_transformer:
        raise ValueError("With a state head and a state, genes are drawn all at once: leave out n_steps.")


def _groups(
    adata: AnnData,
    groupby: str | None,
    groups: str | Sequence[str] | None,
    between: tuple[str, str] | None,
    fraction: float | Sequence[float] | None,
) -> tuple[np.ndarray | None, list[Group]]:
    """Group of each cell, and the groups to draw."""
    from scdiva.generation.sampling import Group

    if fraction is not None and between is None:
        raise ValueError("fraction is given without the two groups that it lies between: between=(one, two).")
    fractions = np.atleast_1d(np.asarray(0.5 if fraction is None else fraction, dtype=float))
    if not len(fractions) or fractions.ndim != 1 or not ((fractions >= 0) & (fractions <= 1)).all():
        raise ValueError(f"fraction must lie in [0, 1], got {fractions.tolist()}.")
    if groupby is None:
        if groups is not None or between is not None:
            raise ValueError("groups or between are given without a column: groupby=...")
        every = np.arange(adata.n_obs)
        return None, [Group("", every, every, 0.0)]
    check_columns(groupby)
    if groups is not None and between is not None:
        raise ValueError("Give groups or between, not both.")
    requested = listed(between or groups or ())
    if not requested and groupby in adata.obs:
        texts = adata.obs[groupby].astype(str).to_numpy(dtype=object).astype(str)
        if (unknown := is_unknown(texts) & adata.obs[groupby].notna().to_numpy()).any():
            name = str(texts[unknown][0])
            raise ValueError(
                f"adata.obs[{groupby!r}] is {name!r} for {unknown.sum()} of {len(texts)} cells, the first is "
                f"{adata.obs_names[unknown.argmax()]!r}. This is not the name of a group. Pass groups=[...], or remove "
                f"these cells: adata = adata[adata.obs[{groupby!r}] != {name!r}].copy()."
            )
    group = read_labels(adata, groupby, meant=requested)
    present, lack = sorted(set(group.tolist())), f"are not in adata.obs[{groupby!r}]"
    if between is None:
        names = wanted_groups(None if groups is None else list(dict.fromkeys(listed(groups))), present, lack)
        rows = [np.flatnonzero(group == name) for name in names]
        return group, [Group(name, of_name, of_name, 0.0) for name, of_name in zip(names, rows, strict=True)]
    if len(requested) != 2:
        raise ValueError(f"between must name two groups, got {len(requested)}.")
    wanted_groups(list(dict.fromkeys(requested)), present, lack)
    one, two = (np.flatnonzero(group == name) for name in requested)
    return group, [Group(" to ".join(requested), one, two, float(part)) for part in fractions]


def _fixed_tokens(fixed: Mapping[str, float], source: CellSource, max_length: int | None) -> dict[int, float]:
    """Fixed values by token; `max_length` limits them if the model reads the cell in steps."""
    names = source.var.index
    by_token: dict[int, float] = {}
    for name, value in fixed.items():
        token = int(source.tokens[np.flatnonzero(names == name)[0]])
        if token < 0:
            raise ValueError(f"fixed names {name!r}, which is not known to the model.")
        if not 0 <= value < np.inf:
            raise ValueError(f"fixed[{name!r}] must be a log-normalised value of 0 or more, got {value!r}.")
        by_token[token] = float(value)
    if (left := len(set(source.tokens[source.tokens >= 0].tolist()) - set(by_token))) < 2:
        what = "fixed leaves" if fixed else "adata has"
        raise ValueError(f"{what} {left} of the genes that the model knows. Generated cells require at least 2.")
    if (total := sum(map(np.expm1, by_token.values()))) >= C.TARGET_SUM:
        raise ValueError(
            f"The values of fixed stand for {total:,.0f} of the {C.TARGET_SUM:,.0f} counts to which a cell is "
            "normalised: they must be log-normalised, log1p(counts per 10,000), and leave room for other genes."
        )
    n_shown = sum(value > 0 for value in by_token.values())
    if max_length is not None and n_shown >= max_length:
        raise ValueError(
            f"fixed shows {n_shown:,} genes, and the model reads {max_length:,} of a cell: fix fewer, or draw with "
            "from_state=True."
        )
    return by_token


def _as_anndata(cells: list[Cell], obs: pd.DataFrame, source: CellSource) -> AnnData:
    """The new cells over the genes that the model knows, in the order of `adata`."""
    from anndata import AnnData

    column = columns_of(source.tokens, source.scan.counts_per_gene)
    model_columns = np.sort(column[column >= 0])
    tokens, values, counts = (np.concatenate(part) for part in zip(*cells, strict=True))
    indptr = np.concatenate([[0], np.cumsum([len(cell[0]) for cell in cells])])
    indices = np.searchsorted(model_columns, column)[tokens]

    def matrix(data: np.ndarray) -> sp.csr_matrix:
        laid = sp.csr_matrix(
            (data.astype(np.float32), indices, indptr), shape=(len(cells), len(model_columns)), copy=True
        )
        laid.sort_indices()
        return laid

    return AnnData(
        matrix(values), obs=obs, var=source.var.iloc[model_columns].copy(), layers={"counts": matrix(counts)}
    )
