"""Every command of the README and of the documentation's pages runs: Python as it stands, on small data."""

from __future__ import annotations

import importlib
import inspect
import re
import tomllib
import warnings
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from scdiva import cli
from scdiva.cli._parser import COMMANDS, command_parser
from scdiva.train import pretrain
from scdiva.train.config import PretrainingConfig

ROOT = Path(__file__).parents[2]


def blocks(page: Path, language: str) -> list[str]:
    """Give the code blocks of a page that are in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.M | re.S)


PAGES = {page.name: page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
# test_large_data.py and test_recipes.py run these pages
ELSEWHERE = ("large_data.md", "recipes.md")
WITH_PYTHON = [name for name, page in PAGES.items() if blocks(page, "python") and name not in ELSEWHERE]
QUICKER = {
    'device="cuda"': 'device="cpu"',
    '.device = "cuda"': '.device = "cpu"',
    '"donor")  #': '"donor", steps=5)  #',
    '(both, "species")': '(both, "species", steps=5)',
    'sd.models.push(model, "hf://lab/atlas", card="# Our atlas ...")': '"scdiva-mini"',
    "sd.datasets.kang()": 'sd.datasets.pbmc3k(path="cells.h5ad")',
    "sd.pl.grn(adata)": "sd.pl.grn(adata, n_edges=20)",
    "adata, 200, groupby": "adata, 5, groupby",
}
"""What is put in the place of what needs minutes, or a device that need not be there."""
NO_NETWORK = {"dim": 16, "n_layers": 1, "n_heads": 2, "ffn_dim": 24, "anchor_linear_dim": 8, "anchor_hidden": 12}


def quicker(block: str) -> str:
    for slow, quick in QUICKER.items():
        block = block.replace(slow, quick)
    return block


@pytest.mark.parametrize("name", WITH_PYTHON)
def test_the_python_of_a_page_runs(name, page_names, folder):
    import matplotlib.pyplot as plt

    import scdiva as sd

    names = page_names()
    with sd.settings.override(seed=0), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # toy data are small and say so
        for number, block in enumerate(blocks(PAGES[name], "python"), 1):
            exec(compile(quicker(block), f"{name}, block {number}", "exec"), names)
            plt.close("all")


def test_what_is_made_quicker_is_there():
    text = "".join(block for page in PAGES.values() for block in blocks(page, "python"))
    assert [slow for slow in QUICKER if slow not in text] == []


def known_command(line: str, extras: set[str], targets: set[str]) -> bool:
    """Whether a bash command and its options are defined in this repository."""
    command = line.split("#")[0].strip()
    if match := re.fullmatch(r"make ([a-z-]+)( DATA=\S+)?", command):
        return match[1] in targets
    if match := re.fullmatch(r"pip install ['\"]?scdiva(?:\[(\S+)\])?['\"]?", command):
        return match[1] is None or set(match[1].split(",")) <= extras
    if match := re.fullmatch(r"scdiva (\w+) (.*)", command):
        if match[1] not in COMMANDS:
            return False
        accepted = {name for action in command_parser(match[1])._actions for name in action.option_strings}
        return set(re.findall(r"--[a-z_.]+", match[2])) <= accepted
    if match := re.fullmatch(r"(?:srun|torchrun|sbatch) (.*)", command):  # a cluster's: what it starts is ours
        options = re.findall(r"--([a-z_]+)", match[1].partition(" pretrain ")[2])
        page_scripts = re.findall(r"^# (\w+\.py)$", "".join(page.read_text() for page in PAGES.values()), flags=re.M)
        scripts = re.findall(r"python (\w+\.py)", match[1])
        return set(options) <= set(inspect.signature(pretrain).parameters) and set(scripts) <= set(page_scripts)
    if match := re.fullmatch(r"(?:PYTHONPATH=src )?python ((?:scripts|benchmarks)/\w+\.py)( .*)?", command):
        options = re.findall(r"--[a-z-]+", match[2] or "")
        return (ROOT / match[1]).is_file() and all(f'"{name}"' in (ROOT / match[1]).read_text() for name in options)
    return False


def test_commands_of_the_shell_are_known():
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    lines = [
        (name, line)
        for name, page in PAGES.items()
        if name not in ("benchmarks.md", "changelog.md")
        for block in blocks(page, "bash")
        for line in block.replace("\nsd.", " sd.").splitlines()  # Python within a command
        if line.strip()
    ]
    assert len(lines) > 10
    assert [(name, line) for name, line in lines if not known_command(line, extras, targets)] == []
    assert not known_command("make tea", extras, targets)
    assert not known_command("pip install 'scdiva[tea]'", extras, targets)
    assert not known_command("scdiva brew -o tea", extras, targets)
    assert not known_command("PYTHONPATH=src python benchmarks/gpu.py --tea", extras, targets)
    assert not known_command("scdiva embed cells.h5ad --milk true", extras, targets)


@pytest.mark.parametrize("name", [name for name in PAGES if name != "benchmarks.md"])
def test_what_is_named_exists(name):
    """Of `sd.part.name` and of `make target`, also where they stand in running text and in tables."""
    text = PAGES[name].read_text(encoding="utf-8")
    names = {(part, thing) for part, thing in re.findall(r"\bsd\.(pp|tl|pl|get|metrics|datasets)\.([a-z_0-9]+)", text)}
    missing = [f"{p}.{t}" for p, t in sorted(names) if not hasattr(importlib.import_module(f"scdiva.{p}"), t)]
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M)
    assert missing == []
    assert [target for target in re.findall(r"`make ([a-z-]+)`", text) if target not in targets] == []


def test_links_of_the_readme_lead_somewhere_wherever_it_is_read():
    """PyPI shows it too, where no link to a file beside it works."""
    text = PAGES["README.md"].read_text(encoding="utf-8")
    assert [link for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith("https://")] == []
    pages = re.findall(r"scdiva\.readthedocs\.io/en/latest/([\w/]+\.\w+)", text)
    assert len(pages) > 8
    assert [file for file in pages if not (ROOT / "docs" / file.replace(".html", ".md")).is_file()] == []


def test_extras_that_pages_name_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    mentioned = {extra for page in PAGES.values() for extra in re.findall(r"scdiva\[([a-z]+)\]", page.read_text())}
    assert mentioned <= set(extras)
    assert mentioned


@pytest.mark.parametrize("name", [name for name, page in PAGES.items() if blocks(page, "yaml")])
def test_configurations_have_fields_that_exist(name):
    for block in blocks(PAGES[name], "yaml"):
        content = yaml.safe_load(block)
        assert set(content) <= set(inspect.signature(pretrain).parameters)
        assert set(content["training"]) <= {field.name for field in fields(PretrainingConfig)}
        PretrainingConfig(**content["training"])


def test_a_model_of_another_species(page_names, folder):
    """The vocabulary and configuration of the page train a model, which embeds the cells with their own genes."""
    import scdiva as sd

    names = page_names()
    for block in blocks(PAGES["genes.md"], "python"):
        exec(quicker(block), names)
    mouse = names["mouse"]
    assert mouse.uns["scdiva"]["match"]["how"]["ortholog"] > 50
    Path("mouse-studies").mkdir()
    mouse[:40].copy().write_h5ad("mouse-studies/one.h5ad")
    content = yaml.safe_load(blocks(PAGES["genes.md"], "yaml")[0])
    content["training"] |= {"steps": 2, "batch_size": 8, "precision": "fp32", "compile_blocks": "no"}
    content |= {"model": NO_NETWORK, "progress": False, "accelerator": "cpu", "min_genes": 1}
    Path("pretrain.yaml").write_text(yaml.safe_dump(content))
    assert cli.main(["pretrain", "--config", "pretrain.yaml"]) == 0
    sd.tl.embed(mouse, "mouse-run/model")
    assert mouse.obsm["X_scdiva"].shape == (mouse.n_obs, 72)
