"""Every command of the page on the command line runs unchanged, apart from options that shorten the run time."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from scdiva import cli
from scdiva.cli._parser import COMMANDS

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
LINES = [line for block in re.findall(r"^```bash\n(.*?)^```", PAGE, flags=re.M | re.S) for line in block.splitlines()]
QUICKER = {"integrate": ["--steps", "3"]}
TINY = {
    "training": {"steps": 2, "batch_size": 8, "context": 40, "precision": "fp32", "warmup_steps": 0},
    "model": {"dim": 16, "n_layers": 1, "n_heads": 2, "ffn_dim": 24, "anchor_linear_dim": 8, "anchor_hidden": 12},
    "accelerator": "cpu",
    "min_genes": 1,
}


def test_every_command_is_shown_and_named_with_its_call():
    commands = {line.split()[1] for line in LINES}
    assert commands == set(COMMANDS)


@pytest.mark.filterwarnings("ignore")
def test_the_commands_run_in_their_order(page_names, folder, capsys):
    names = page_names()
    for name in ("query", "screen"):
        names[name].raw = None
        names[name].write_h5ad(f"{name}.h5ad")
    Path("studies").mkdir()
    names["adata"].raw = None
    names["adata"].write_h5ad("studies/one.h5ad")
    Path("run/model").unlink()  # what other pages find there
    Path("tiny.yaml").write_text(yaml.safe_dump(TINY))
    for line in LINES:
        line, _, into = line.partition(" > ")
        _, command, *words = shlex.split(line)
        more = ["--config", "tiny.yaml"] if command == "pretrain" else QUICKER.get(command, [])
        try:
            code = cli.main([command, *words, *more])
        except SystemExit as ended:  # --print_config ends so
            code = ended.code
        printed, wrong = capsys.readouterr()
        assert code == 0, wrong
        if into:
            Path(into).write_text(printed)
        elif command != "info":
            assert all(Path(written).exists() for written in printed.splitlines())
    assert Path("run/model/model.safetensors").exists()
