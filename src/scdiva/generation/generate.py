"""Draw cells from a model."""

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
from scdiva._running import model_name, open_cells_for_model, resolve_run_config
from scdiva._settings import logger, torch_threads_kept
from scdiva.data.genes import column_tokens, columns_of, or_in_raw
from scdiva.data.options import InputOptions, Species
from scdiva.data.results import check_anndata, check_columns

if TYPE_CHECKING:
    import torch
    from anndata import AnnData

    from scdiva.generation.sampling import Drawn, Order
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
    gene_ids: str | None = None,
    species: Species = None,
    duplicates: Literal["sum", "error"] = "sum",
    rng: int | np.random.Generator | torch.Generator | None = None,
    device: str | None = None,
    precision: Literal["auto", "fp32", "bf16"] | None = None,
) -> AnnData:
    r"""Draw new cells like those of a data set, of a group of it, or between two groups.

    A cell of the data is drawn and its state read; from that state a new cell of as many genes and the same depth. What
    cells of a state express is what the model's state head says, corrected by the cells of `adata` gene by gene
    and, with `groupby`, group by group (:func:`scdiva.generation.corrections.fit_population`). Values are drawn as
    counts (:func:`scdiva.generation.sampling.draw_counts`). No gene occurs twice in a cell, and no value is negative.

    Given the state and their number, genes are independent and are drawn all at once. The transformer is not run:
    a classifier separates cells that it draws step by step from real ones far better than these (see the benchmarks).

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
        Cells × genes, raw counts or log-normalised expression: which genes there are, what a cell may look like, and
        what the groups are. Not changed.
    n_cells
        Cells to draw; of each group, where groups are asked for.
    model
        A loaded model, a model folder, the name of a bundled model, or `"hf://owner/name"`.
    groupby, groups
        Column of `adata.obs`, and those of its groups that are drawn from; None: all of them. A word such as
        `"unlabelled"`, `"unknown"` or `"-"` is a group only if it is named in `groups` or `between`, as in
        :func:`annotate` it is no label.
    between, fraction
        Two groups of `groupby`, and how far from the first to the second, 0 to 1: each new cell's state lies so far
        between those of a cell of either. Of several fractions so many cells each are drawn; None: half-way.
    fixed
        Genes that every new cell shows, and their log-normalised values on the scale of the result, such as
        `{"CD3D": 2.0}`; 0: not expressed. With a state, the rest is drawn as it would be.
    from_state
        False: no state is given; genes are revealed in eight steps (reverse process; paper, algorithm "scDiVa
        Inference"), and in each the state is read from those that are there, the fixed ones at first. Only the number
        of genes and the depth are the data's. Without a state head: the cell is drawn from fully masked positions.
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
        Steps in which genes are revealed. None: 32 for a model without a state head; 8 with a state head and
        `from_state=False`.
    %(reading)s
    rng
        Seed, or a generator; None takes `scdiva.settings.seed`. A new cell depends on the seed and its number, not on
        threads.
    device, precision
        Torch device, and `"fp32"`, `"bf16"` or `"auto"`; None takes those of `scdiva.settings`. Used by a model without
        a state head only: with one, everything runs in float32 on the CPU.

    Returns
    -------
    AnnData of the new cells and those genes of `adata` that the model knows, which scanpy takes unchanged: `X`, CSR
    float32, log-normalised (to 10,000 a cell over all genes of `adata`, log1p); `layers["counts"]`, the counts drawn;
    `obs[groupby]`, `obs["scdiva_fraction"]` between groups, and `obs["scdiva_source"]`, the name of the cell whose
    number of genes, depth and state it has; `var` of `adata`; the arguments under `uns["scdiva"]["generate"]`.

    Raises
    ------
    ValueError
        If an argument is out of range, a group or a fixed gene is not there, a group has no cell with a known gene,
        fewer than 20 cells have one, `fixed` leaves nothing to be drawn, `prompt` or `n_steps` does not apply to the
        model, or the matrix is refused as by :func:`embed`.
    KeyError
        If `groupby` is no column of `adata.obs`.
    TypeError
        If `adata` is no AnnData object.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.toy(60, 100)
    >>> made = sd.tl.generate(adata, 5, groupby="cell_type")
    >>> made.n_obs, made.layers["counts"].shape
    (20, (20, 89))
    """
    check_anndata(adata)
    begun = time.monotonic()
    check_least(n_cells=(n_cells, 1))
    n_cells = operator.index(n_cells)
    group, plan = _plan(adata, n_cells, groupby, groups, between, fraction)
    reading = InputOptions(layer, use_raw, input, gene_ids, species, duplicates)
    if device is not None or precision is not None:
        resolve_run_config(None, device, precision)  # refused before anything is read, whichever part of the model runs

    from scdiva.data.memory import read_cells
    from scdiva.generation import inpainting
    from scdiva.generation.sampling import N_STEPS, draw_cells, place_orders
    from scdiva.generation.states import fit_to, on_cpu, states_of
    from scdiva.models.pretrained import load_for

    seed = seed_of(rng)
    loaded = load_for(model, "cpu")
    by_transformer = loaded.config.by_transformer
    _check_steps(by_transformer, from_state, prompt, n_steps)
    # the other heads run on the CPU
    run_config = (
        resolve_run_config(None, device, precision) if by_transformer else resolve_run_config(None, "cpu", "fp32")
    )
    var, most = reading.var(adata), None if from_state and not by_transformer else loaded.config.max_length
    if fixed:  # names are refused before a cell is read
        if absent := [name for name in fixed if name not in var.index]:
            raise ValueError(
                f"fixed names {absent[0]!r}, which is no gene of adata{or_in_raw(adata, absent[0], use_raw)}."
            )
        _fixed(fixed, column_tokens(var, loaded.vocabulary, reading), var.index, most)
    _, opened, parameters = open_cells_for_model(loaded, adata, run_config, reading, empty="nan")
    shown = _fixed(fixed or {}, opened.tokens, var.index, most)
    draw = np.random.default_rng(step_seed(seed, 0, "generate"))
    with torch_threads_kept(1):  # products too small to share
        cells, rows = read_cells(opened, np.zeros(adata.n_obs, dtype=np.int64), whole=True, trains=False)
    if by_transformer:
        n_steps = n_steps or inpainting.N_STEPS
        prompt = (prompt or "genes") if from_state else None
        orders = place_orders(plan, rows, draw)
        made = inpainting.draw_by_diffusion(loaded, cells, orders, shown, prompt, n_steps, seed, run_config)
    else:
        with on_cpu(loaded):
            with torch_threads_kept(1):
                states = states_of(loaded, cells)
                if group is not None:  # differences of groups are met group by group
                    of_cell = group[rows]
                    states = states._replace(group=(of_cell[:, None] == np.unique(of_cell)).astype(np.float32))
                fitted = fit_to(loaded, cells, states, draw)
            orders = place_orders(plan, rows, draw)
            n_steps = n_steps or N_STEPS
            made = draw_cells(fitted, cells, states, orders, shown, from_state, seed, n_steps)
    columns = columns_of(opened.tokens, opened.scan.counts_per_gene)
    result = _result(adata, opened.var, made, columns, orders, rows, groupby, between)
    names, values = list(fixed or {}), list((fixed or {}).values())
    result.uns[C.UNS] = {
        C.GENERATE: {
            **parameters,
            "model": model_name(model),
            "groupby": groupby or "",
            "groups": np.array(list(dict.fromkeys(order.name for order in plan)) if groupby else [], dtype=object),
            "fraction": np.array([order.fraction for order in plan] if between is not None else [], dtype=float),
            "from_state": bool(from_state),
            "prompt": prompt or "",
            "n_steps": int(n_steps) if by_transformer or not from_state else 1,
            # not by name: a gene may have a name that is no key of a file
            "fixed": {"gene": np.array(names, dtype=object), "value": np.array(values, float)} if fixed else {},
            "seed": str(seed),
            "seconds": time.monotonic() - begun,
        }
    }
    logger.info("drew %d cells in %.0f s", result.n_obs, time.monotonic() - begun)
    return result


def _check_steps(by_transformer: bool, from_state: bool, prompt: str | None, n_steps: int | None) -> None:
    """Raise ValueError for options that this model or this way of drawing does not have."""
    check_least(n_steps=(1 if n_steps is None else n_steps, 1))
    if prompt is not None:
        check_choices(prompt=(prompt, ("genes", "state")))
        if not by_transformer or not from_state:
            why = (
                "from_state=False gives none" if by_transformer else "the model has a state head, which reads the state"
            )
            raise ValueError(f"prompt says what a new cell is given of its source, but {why}: leave out prompt.")
    if n_steps is not None and from_state and not by_transformer:
        raise ValueError("With a state head and a state, genes are drawn all at once: leave out n_steps.")


def _plan(
    adata: AnnData,
    n_cells: int,
    groupby: str | None,
    groups: str | Sequence[str] | None,
    between: tuple[str, str] | None,
    fraction: float | Sequence[float] | None,
) -> tuple[np.ndarray | None, list[Order]]:
    """Group of each cell, and the rows to draw from and number of cells to draw for each group."""
    from scdiva.generation.sampling import Order

    if fraction is not None and between is None:
        raise ValueError("fraction is given without the two groups that it lies between: between=(one, two).")
    fractions = np.atleast_1d(np.asarray(0.5 if fraction is None else fraction, dtype=float))
    if not len(fractions) or fractions.ndim != 1 or not ((fractions >= 0) & (fractions <= 1)).all():
        raise ValueError(f"fraction must lie in [0, 1], got {fractions.tolist()}.")
    if groupby is None:
        if groups is not None or between is not None:
            raise ValueError("groups or between are given without a column: groupby=...")
        every = np.arange(adata.n_obs)
        return None, [Order(every, every, "", 0.0, n_cells)]
    check_columns(groupby)
    if groups is not None and between is not None:
        raise ValueError("Give groups or between, not both.")
    wanted = listed(between or groups or ())
    if not wanted and groupby in adata.obs:
        texts = adata.obs[groupby].astype(str).to_numpy(dtype=object).astype(str)
        if (unknown := is_unknown(texts) & adata.obs[groupby].notna().to_numpy()).any():
            name = str(texts[unknown][0])
            raise ValueError(
                f"adata.obs[{groupby!r}] is {name!r} for {unknown.sum()} of {len(texts)} cells, the first is "
                f"{adata.obs_names[unknown.argmax()]!r}. That names no group. Name the groups, groups=[...], or leave "
                f"these cells out: adata = adata[adata.obs[{groupby!r}] != {name!r}].copy()."
            )
    group = read_labels(adata, groupby, meant=wanted)
    present, lack = sorted(set(group.tolist())), f"are not in adata.obs[{groupby!r}]"

    def rows_of(name: str) -> np.ndarray:
        return np.flatnonzero(group == name)

    if between is None:
        names = wanted_groups(None if groups is None else list(dict.fromkeys(listed(groups))), present, lack)
        return group, [Order(rows_of(name), rows_of(name), name, 0.0, n_cells) for name in names]
    pair = listed(between)
    if len(pair) != 2:
        raise ValueError(f"between must name two groups, got {len(pair)}.")
    one, two = pair
    wanted_groups(list(dict.fromkeys(pair)), present, lack)
    return group, [Order(rows_of(one), rows_of(two), f"{one} to {two}", float(part), n_cells) for part in fractions]


def _fixed(
    fixed: Mapping[str, float], of_column: np.ndarray, names: pd.Index, max_length: int | None
) -> dict[int, float]:
    """Give fixed genes by token; `max_length` is what a model reads of a cell, where it is asked step by step."""
    shown: dict[int, float] = {}
    for name, value in fixed.items():
        at = np.flatnonzero(names == name)
        if of_column[at[0]] < 0:
            raise ValueError(f"fixed names {name!r}, which is not known to the model.")
        if not 0 <= value < np.inf:
            raise ValueError(f"fixed[{name!r}] must be a log-normalised value of 0 or more, got {value!r}.")
        shown[int(of_column[at[0]])] = float(value)
    left = len(set(of_column[of_column >= 0].tolist()) - set(shown))
    if left < 2:
        raise ValueError(f"fixed leaves {left} of the genes that the model knows to be drawn: leave at least 2.")
    if (total := sum(map(np.expm1, shown.values()))) >= C.TARGET_SUM:
        raise ValueError(
            f"The values of fixed stand for {total:,.0f} of the {C.TARGET_SUM:,.0f} counts to which a cell is "
            "normalised: they must be log-normalised, log1p(counts per 10,000), and leave room for other genes."
        )
    n_shown = sum(value > 0 for value in shown.values())
    if max_length is not None and n_shown >= max_length:
        raise ValueError(
            f"fixed shows {n_shown:,} genes, and the model reads {max_length:,} of a cell: fix fewer, or draw with "
            "from_state=True."
        )
    return shown


def _result(
    adata: AnnData,
    var: pd.DataFrame,
    made: Drawn,
    columns: np.ndarray,
    orders: list[Order],
    rows: np.ndarray,
    groupby: str | None,
    between: tuple[str, str] | None,
) -> AnnData:
    import anndata as ad

    # genes that the model knows, in the order of adata
    kept = np.sort(columns[columns >= 0])
    place = np.searchsorted(kept, columns)
    shape = (len(made.indptr) - 1, len(kept))

    def matrix(data: np.ndarray) -> sp.csr_matrix:
        found = sp.csr_matrix((data.astype(np.float32), place[made.tokens], made.indptr), shape=shape)
        found.sort_indices()
        return found

    numbers = np.array([order.n_cells for order in orders])
    obs = pd.DataFrame(index=[f"generated_{number}" for number in range(shape[0])])
    obs[C.OBS_SOURCE] = adata.obs_names.to_numpy()[rows[made.source]]
    if groupby is not None:
        obs[groupby] = pd.Categorical(np.repeat([order.name for order in orders], numbers))
        if between is None and isinstance(adata.obs[groupby].dtype, pd.CategoricalDtype):
            ordered = [str(name) for name in adata.obs[groupby].cat.categories if str(name) in set(obs[groupby])]
            obs[groupby] = obs[groupby].cat.reorder_categories(ordered)
    if between is not None:
        obs[C.OBS_FRACTION] = np.repeat([order.fraction for order in orders], numbers)
    result = ad.AnnData(matrix(made.values), obs=obs, var=var.iloc[kept].copy())
    result.layers["counts"] = matrix(made.counts)
    return result
