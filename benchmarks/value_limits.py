"""How much of the values of masked genes can be known, and how much of that a transformer predicts.

    python benchmarks/value_limits.py --corpus FOLDER --base FOLDER --heads HEAD TRANSFORMER

Studies, base, heads and queries of values are those of denoising.py: the first head predicts without a transformer, the
second with one. Two things that no head is given are added to its predictions:

- One count: its value in a cell, the smallest that the cell shows. A gene that is expressed has one at least, and two
  thirds of the values asked for are just that; it is high where a cell is shallow.
- The other half: counts of the same gene in the half of the cell's counts that is not shown, an independent measurement
  of what is asked.

A value less one count is predicted by gradient boosting that rises with the prediction less one count, and with the
counts in the other half; fitted to the other studies, each weighed the same.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from _denoising_arms import Study, queries
from _record import record
from _scripts import load_head
from _timing import report
from denoising import HELD_OUT, held_out_cells, lead, spearman_within, study_of
from sklearn.ensemble import HistGradientBoostingRegressor

from scdiva.models import load_model

ONE, OTHER = "one count", "the other half"
HEAD, READER = "query head", "values by transformer"
GIVEN = (f", {ONE}", f", {ONE} and {OTHER}")
LEAST_VALUES, ROUNDS = 500, 100
"""Values in a leaf, and trees."""
LEAST_EXCESS = 1e-4
"""Values nearer to one count are one."""


def one_count(study: Study) -> np.ndarray:
    """Log-normalised value of one count in the cell of each value that is asked for."""
    _, values, bounds = study.asked.seen
    least = torch.stack([part.min() for part in values.split(bounds.diff().tolist())])
    return least[study.asked.value_cell].numpy()


def other_half(study: Study) -> np.ndarray:
    """Counts in the other half, of the genes whose values are asked for."""
    tokens, counts, bounds = study.whole
    whole = torch.zeros(len(bounds) - 1, int(tokens.max()) + 1, dtype=torch.float64)
    whole[torch.arange(len(bounds) - 1).repeat_interleave(bounds.diff()), tokens] = counts.of_token
    shown = np.expm1(study.asked.value.double().numpy()) / np.expm1(one_count(study).astype(np.float64))
    return whole[study.asked.value_cell, study.asked.value_token].numpy() - shown.round()


def fitted(known: dict[str, np.ndarray], excess: dict[str, np.ndarray], name: str) -> np.ndarray:
    """Predict values less one count in a study by what is known of them `(n, k)`, fitted to the other studies."""
    others = [one for one in known if one != name]
    model = HistGradientBoostingRegressor(
        max_iter=ROUNDS, min_samples_leaf=LEAST_VALUES, monotonic_cst=[1] * known[name].shape[1], random_state=0
    )
    weight = np.concatenate([np.full(len(excess[one]), 1 / len(excess[one])) for one in others])
    model.fit(*(np.concatenate([part[one] for one in others]) for part in (known, excess)), sample_weight=weight)
    return model.predict(known[name])


def goals(rows: list[dict]) -> list[dict]:
    """By how much arms lead others, mean over the studies."""
    at = {(row["arm"], row["set"]): row for row in rows}
    sets, found = list(dict.fromkeys(row["set"] for row in rows)), []
    pairs = [(READER + about + given, HEAD + about + given) for about in ("", ", context") for given in ("", *GIVEN)]
    pairs += [(f"{arm}{GIVEN[1]}", f"{arm}{GIVEN[0]}") for arm in (f"{HEAD}, context", f"{READER}, context")]
    for one, theirs in pairs:
        for key, sign in (("spearman", 1), ("rmse", -1)):
            leads = [sign * (at[one, name][key] - at[theirs, name][key]) for name in sets]
            found.append(lead(f"{one}: {key} ahead of {theirs}", leads))
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--base", type=Path, required=True, help="folder of train_mini.py without these studies")
    parser.add_argument("--heads", type=Path, nargs=2, required=True, help="of train_denoiser.py on that base")
    parser.add_argument("--studies", nargs="+", default=list(HELD_OUT))
    parser.add_argument("--cells", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    model = load_model(arguments.base / "model")
    cells = held_out_cells(arguments.corpus, arguments.base, model)
    studies = {
        name: study_of(cells, number, arguments.cells, arguments.seed)
        for number, name in enumerate(cells.study_names)
        if name in arguments.studies
    }
    one = {name: one_count(study) for name, study in studies.items()}
    other = {name: other_half(study) for name, study in studies.items()}
    excess = {name: study.asked.value.numpy() - one[name] for name, study in studies.items()}

    def given(known: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {name: one[name] + fitted(known, excess, name) for name in studies}

    predicted = {ONE: one, OTHER: given({name: counts[:, None] for name, counts in other.items()})}
    for arm, file in zip((HEAD, READER), arguments.heads, strict=True):
        module = load_head(model, file)
        for about in ("", ", context"):
            answer = queries([module], context=bool(about))
            found = {name: answer(study)[1].numpy() for name, study in studies.items()}
            beyond = {name: (found[name] - one[name])[:, None] for name in studies}
            with_other = {name: np.column_stack([beyond[name], other[name]]) for name in studies}
            ways = (found, given(beyond), given(with_other))
            predicted |= {arm + about + what: way for what, way in zip(("", *GIVEN), ways, strict=True)}
    rows = []
    for arm, found in predicted.items():
        for name, study in studies.items():
            value, gene = study.asked.value.numpy(), study.asked.value_token.numpy()
            rows.append({
                "set": name, "arm": arm, "n_values": len(value),
                "share_of_one": round(float((excess[name] < LEAST_EXCESS).mean()), 3),
                "spearman": round(spearman_within(found[name], value, gene), 4),
                "rmse": round(float(np.sqrt(np.square(found[name] - value).mean())), 4),
            })  # fmt: skip
    judged = goals(rows)
    record("value_limits", [*rows, *judged])
    report(judged)


if __name__ == "__main__":
    main()
