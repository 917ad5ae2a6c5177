"""The pretraining commands of the quickstart run at a small size."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from scdiva import cli

DOCS = Path(__file__).parents[2] / "docs"
SMALL = (
    "--training.steps 2 --training.batch_size 8 --training.context 40 --training.precision fp32"
    " --training.warmup_steps 0 --model.dim 16 --model.n_layers 1 --model.n_heads 2 --model.ffn_dim 24"
    " --model.anchor_linear_dim 8 --model.anchor_hidden 12 --accelerator cpu --min_genes 1"
)


@pytest.mark.filterwarnings("ignore")
def test_the_commands_run_in_their_order(page_names, folder):
    Path("studies").mkdir()
    cells = page_names()["adata"]
    cells.raw = None
    for number in range(2):
        cells[number::2].copy().write_h5ad(f"studies/{number}.h5ad")
    Path("run/model").unlink()  # what other pages find there
    Path("run").rmdir()
    Path("pretrain.yaml").write_text("train: [studies]\nout: other-run\n")
    page = (DOCS / "quickstart.md").read_text(encoding="utf-8")
    lines = re.findall(r"^scdiva pretrain .*$", page, flags=re.M)
    assert len(lines) == 3
    for line in lines:
        _, command, *words = shlex.split(line)
        assert cli.main([command, *words, *SMALL.split()]) == 0


def test_a_task_of_the_array_runs(folder, monkeypatch):
    page = (DOCS / "large_data.md").read_text(encoding="utf-8")
    command = re.search(r"^```bash\n(sbatch .*?)\n```", page, flags=re.M | re.S)[1]
    wrapped = shlex.split(command)[-1]
    interpreter, flag, script = shlex.split(wrapped)
    assert (interpreter, flag) == ("python", "-c")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "0")
    assert "64))" in script
    exec(script.replace("64))", "1))"), {})  # sixty cells are one window, which one task does
    assert Path("atlas_scdiva.h5ad").exists()
