"""Commands, scripts and calculated resources of the page on large data."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest

from scdiva.cli import main
from scdiva.cli._parser import parse
from scdiva.datasets import toy
from scdiva.models import load_model
from scdiva.tokenizer.vocabulary import Vocabulary
from scdiva.train import PretrainingConfig

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "large_data.md").read_text(encoding="utf-8").partition("## Pretraining at scale")[2]
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, flags=re.DOTALL)
SMALL = shlex.split(
    "--training.batch_size 8 --training.accumulate 1 --training.context 40 --training.precision fp32"
    " --training.warmup_steps 0 --model.dim 16 --model.n_layers 1 --model.n_heads 2 --model.ffn_dim 24"
    " --model.anchor_linear_dim 8 --model.anchor_hidden 12 --accelerator cpu --progress false"
)
COMMANDS = [line for language, text in BLOCKS if language == "bash" for line in text.splitlines()]


def rows(start: str) -> list[list[str]]:
    """Cells of the table rows that start with a text."""
    lines = [line.strip("|").split("|") for line in PAGE.splitlines() if line.startswith(f"| {start}")]
    return [[cell.strip() for cell in row] for row in lines]


@pytest.mark.parametrize("command", [line for line in COMMANDS if "pretrain" in line])
def test_pretraining_commands_parse(command):
    words = shlex.split(command)
    launcher, arguments = words[: words.index("pretrain")], words[words.index("pretrain") :]
    assert launcher[0] in ("torchrun", "srun")
    assert launcher[-1] == "scdiva"
    _, options = parse(arguments)
    assert options["train"] == ["corpus"]
    assert options["out"] == "run"


def test_a_job_array_packs_one_shard_each():
    array = shlex.split(next(line for line in COMMANDS if "--shard" in line))
    _, options = parse(shlex.split(array[-1].replace("$SLURM_ARRAY_TASK_ID", "63"))[1:])
    assert (options["shard"], options["workers"]) == ((63, 64), 4)


def test_the_commands_and_scripts_run(tmp_path, monkeypatch):
    scripts = {text.splitlines()[0]: text for language, text in BLOCKS if language == "python"}
    monkeypatch.chdir(tmp_path)
    for folder in ("train/part0", "train/part1", "validation", "atlas"):
        Path(folder).mkdir(parents=True)
        toy(40, 400, rng=len(folder)).write_h5ad(Path(folder) / f"{folder[-5:]}.h5ad")
    exec(compile(scripts["# entropy.py"].replace("min_genes=200", "min_genes=1"), "entropy.py", "exec"), {})
    assert np.isfinite(Vocabulary.read("vocabulary.safetensors").table["entropy"]).any()
    for line in COMMANDS:
        if line.startswith("scdiva pack"):
            assert main(shlex.split(line.partition("--workers")[0])[1:]) == 0
    assert sorted(file.parent.name for file in Path().glob("*/index.json")) == ["corpus", "corpus-validation"]
    torchrun, srun, resumed = (shlex.split(line.split("scdiva ")[1]) for line in COMMANDS if "pretrain" in line)
    for number, command in enumerate((srun, torchrun, resumed)):  # without their launchers, in one small process
        assert ("--resume" in command) == (number == 2)
        if number:  # another run; or this one as it is where its last step is done and its model not yet written
            shutil.rmtree(("run", "run/model")[number - 1])
        assert main([*command, *SMALL, "--training.steps", "2"]) == 0
        assert Path("run/model/model.safetensors").exists()
    script = scripts["# pretrain.py"].replace('"run"', '"again"').replace("96, accumulate=4", "4, steps=1")
    exec(compile(script, "pretrain.py", "exec"), scope := {})
    assert scope["folder"].name == "model"
    script = scripts["# continue.py"].replace('"corpus-more")', '"corpus-more", min_genes=1)')
    script = script.replace("steps=2000", "steps=1, batch_size=4").replace("init=", "min_genes=1, init=")
    exec(compile(script, "continue.py", "exec"), scope := {})
    assert load_model("run-more/model", device="cpu").vocabulary == scope["more"]
    assert scope["more"].n_genes == 41_818
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "0")
    script = scripts["# embed.py"].replace('model="run/model"', 'model="scdiva-mini"')
    exec(compile(script, "embed.py", "exec"), {})
    assert Path("embedded/atlas.h5ad").exists()


def test_global_batches_are_768():
    table = [row for row in rows("") if len(row) == 4 and row[0].isdigit()]
    assert len(table) == 4
    for row in table:
        gpus, batch_size, accumulate, cells = map(int, row)
        assert gpus * batch_size * accumulate == cells == 768


def test_the_plan_adds_up():
    """The plan follows from the measured rates."""
    results = {
        name: json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["rows"]
        for name in ("speed", "scaling", "gpu")
    }
    (typical,) = (row for row in results["speed"] if row["what"].endswith("rate, bf16, typical cells"))
    cells = np.array([59_162_450, 100_000_000])

    def figures(start: str) -> list[float]:
        (row,) = rows(start)
        return [float(cell.replace(",", "")) for cell in row[2:]]

    genes = typical["genes_per_cell"]
    assert figures("packed corpus, GB") == pytest.approx(cells * (6 * genes + 6) / 1e9, abs=1)
    (rate,) = (row["cells_per_s"] for row in results["gpu"] if row["what"] == "fit, packed cells")
    (embeds,) = (row["cells_per_s"] for row in results["gpu"] if row["what"] == "tl.embed, full cells")
    hours = cells * 4 / rate / 3600
    assert figures("training, 4 epochs") == pytest.approx(hours, abs=1)
    assert figures("training, hours on 8") == pytest.approx(hours / 8, abs=0.1)
    assert figures("training, $") == pytest.approx(3 * hours, abs=1)
    assert figures("training, steps")[0] == PretrainingConfig.paper().steps
    assert figures("reading, MB/s for 8") == pytest.approx([8 * rate * (6 * genes + 6) / 1e6] * 2, abs=1)
    embedded = [row for row in results["scaling"] if row.get("call") == "tl.embed_file" and row.get("part") == "cells"]
    largest = max(embedded, key=lambda row: row["n_cells"])
    bundled = cells / largest["n_cells"] * largest["cpu_seconds"] / 3600
    assert figures("embedding, bundled") == pytest.approx(bundled, abs=0.1)
    assert figures("embedding, paper's network, GPU") == pytest.approx(cells / embeds / 3600, abs=0.1)


def test_the_memory_adds_up():
    import torch

    from scdiva.models import ScDiVa, ScDiVaConfig

    with torch.device("meta"):
        n = ScDiVa(ScDiVaConfig()).n_parameters
    table = dict(row for row in rows("") if len(row) == 2)
    sizes = {what.split(",")[0].split(":")[0]: size for what, size in table.items()}
    assert float(sizes["weights"]) == pytest.approx(16 * n / 1e9, rel=0.01)
    assert float(sizes["DDP's buckets"]) == pytest.approx(4 * n / 1e9, rel=0.02)
    result = json.loads((ROOT / "benchmarks" / "results" / "speed.json").read_text())
    what = "kept for backward: bfloat16 autocast, whole network and loss"
    (token,) = [row["bytes_per_token"] for row in result["rows"] if row["what"] == what]
    assert f"{token / 1e3:.0f} kB a token" in PAGE
    assert float(sizes["activations of 96 cells of 1"]) == pytest.approx(token * 96 * 1201 / 1e9, rel=0.01)
    assert float(sizes["gene head"].split(" to ")[0]) == pytest.approx(4096 * 41_818 * 2 / 1e9, rel=0.02)
