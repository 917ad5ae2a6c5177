"""Fine-tuning by `tl.integrate`, `tl.annotate` and `tl.fit_perturbation`: resumed, refused, and without an effect."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import scdiva as sd
from scdiva.annotation.fit import AnnotationObjective
from scdiva.integration.objective import IntegrationObjective
from scdiva.perturbation.response_head import ResponseObjective

CALLS = {
    "integrate": (lambda data, **how: sd.tl.integrate(data, "batch", **how), IntegrationObjective),
    "annotate": (lambda data, **how: sd.tl.annotate(data, "partly", **how), AnnotationObjective),
    "fit_perturbation": (lambda data, **how: sd.tl.fit_perturbation(data, "perturbed", **how), ResponseObjective),
}
TUNE = {"finetune": True, "epochs": 2, "rng": 3}
pytestmark = [pytest.mark.parametrize("name", CALLS), pytest.mark.filterwarnings("ignore:fine-tuning did not lower")]


class Stopped(Exception):
    pass


@pytest.fixture(scope="module")
def data(adata):
    """Never written to."""
    data, (a, b) = sd.datasets.toy(120, 60, n_batches=3, rng=1), adata.var_names[:2]
    data.obs["partly"] = data.obs["cell_type"].where(np.arange(120) % 4 > 0)
    data.obs["perturbed"] = np.resize(["control", a, b, f"{a}+{b}"], 120)
    return data


def trained(result) -> list:
    """Weights of the model that a call returns, and of its head."""
    modules = [result] if isinstance(result, torch.nn.Module) else [result.model, result.head]
    return [value for module in modules for value in module.state_dict().values()]


def test_a_resumed_run_gives_the_same_bits(data, learned, hashed, tmp_path, monkeypatch, name):
    call, objective = CALLS[name]
    expected, cells = trained(call(data.copy(), model=learned, lora=2, **TUNE)), data.copy()
    how = TUNE | {"model": learned, "lora": 2, "checkpoint_dir": tmp_path / "run"}

    def stops_in_the_second_epoch(self, network, rows, progress, generator, forward=objective.forward):
        if progress > 0.5:
            raise Stopped
        return forward(self, network, rows, progress, generator)

    with monkeypatch.context() as patch:
        patch.setattr(objective, "forward", stops_in_the_second_epoch)
        with pytest.raises(Stopped):
            call(cells, **how)
    assert hashed(cells) == hashed(data)
    assert (tmp_path / "run" / "last.ckpt").exists()
    resumed = trained(call(cells, **how))
    assert len(resumed) == len(expected)
    assert all(map(torch.equal, resumed, expected))
    with pytest.raises(ValueError, match="other cells"):
        call(data[::-1].copy(), **how)
    with pytest.raises(ValueError, match=r"lr=.* not 0\.0001"):
        call(data.copy(), **how, lr=1e-4)


@pytest.mark.parametrize(
    ("options", "match"), [({"epochs": 2}, "finetune=True"), ({"finetune": True, "freeze": 3}, "freeze=3")]
)
def test_arguments_are_refused_before_anything_is_read(data, learned, hashed, monkeypatch, name, options, match):
    for module in ("perturbation.screen", "models.inference", "annotation.annotate"):
        monkeypatch.setattr(f"scdiva.{module}.open_cells", None)
    cells = data.copy()
    with pytest.raises(ValueError, match=match):
        CALLS[name][0](cells, model=learned, **options)
    assert hashed(cells) == hashed(data)


def test_a_loss_that_is_not_finite_leaves_everything_as_it_was(data, learned, hashed, weights, same, name):
    cells, before = data.copy(), weights(learned)
    with pytest.raises(FloatingPointError, match="lower learning rate"):
        CALLS[name][0](cells, model=learned, **TUNE | {"lr": 1e30})
    assert hashed(cells) == hashed(data)
    assert same(weights(learned), before)
