"""`--help` says of each option what its docstring says, and at once."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys

import pytest

import scdiva as sd
from scdiva import cli
from scdiva.cli._calls import CALLS
from scdiva.cli._parser import COMMANDS, arguments, command_parser, plain, summary

SKIPPED = {"adata", "path", "copy"}


def helped(capsys, *words) -> str:
    """Give a help as one line."""
    with pytest.raises(SystemExit) as ended:
        cli.main([*words, "--help"])
    assert ended.value.code == 0
    return " ".join(capsys.readouterr().out.split())


def test_the_commands_are_listed_and_the_version_is_told(capsys):
    said = helped(capsys)
    for name, line in COMMANDS.items():
        assert f"{name} {line}" in said
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"scdiva {sd.__version__}\n"


@pytest.mark.parametrize("words", [[], ["embd"], ["--versio"]])
def test_what_is_no_command_is_refused(capsys, words):
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert {"embd": "'embed'"}.get("".join(words), "integrate") in said


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "info"])
def test_no_option_refers_to_a_text_that_the_help_does_not_show(capsys, name):
    said = helped(capsys, name)
    assert not re.findall(r"See above|see above|As for [a-z]+[.,]|As there", said)


@pytest.mark.parametrize("name", CALLS)
def test_every_argument_is_explained_by_its_docstring(capsys, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "1000")  # no word is cut at a hyphen
    said = helped(capsys, name)
    function = CALLS[name].function
    texts = arguments(function)
    taken = [one for one in inspect.signature(function).parameters if one not in SKIPPED]
    assert len(taken) > 10
    for one in taken:
        assert re.search(rf"--{one}[ ,]", said)  # Python 3.13 names both spellings of a list before its value
        first = texts[one].split(". ")[0]
        assert len(first) > 5
        if one not in ("out", "overwrite") and not first.startswith("As "):  # these are another call's
            assert first in said
    assert summary(function) in said


def test_fields_of_training_and_model_are_explained(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    said = helped(capsys, "pretrain")
    for text in ("Genes of a cell seen in training", "Most genes a cell may hold", "Go on from out/last.ckpt"):
        assert text in said
    unexplained = [
        action.dest
        for action in command_parser("pretrain")._actions
        if not action.help and action.dest not in ("model", "training")
    ]
    assert unexplained == []


def test_help_loads_nothing_heavy():
    code = (
        "import sys, json\nfrom scdiva.cli import main\n"
        "for words in (['--help'], ['embed', '--help'], ['perturb', '--help']):\n"
        "    try:\n        main(words)\n    except SystemExit:\n        pass\n"
        "sys.stdout.write('\\n' + json.dumps(sorted({'torch', 'scanpy', 'anndata', 'pytorch_lightning', 'sklearn'} "
        "& set(sys.modules))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == []


ERRORS = {
    "none.h5ad": [
        ["embed", "none.h5ad", "-o", "out.h5ad"], ["integrate", "none.h5ad", "-o", "out.h5ad", "--batch_key", "donor"],
        ["pretrain", "--train", "[none.h5ad]", "--out", "run"],
        ["annotate", "here.h5ad", "-o", "out.h5ad", "--labels_key", "a", "--reference", "none.h5ad"],
    ],
    "nonesuch": [
        ["generate", "here.h5ad", "-o", "out.h5ad", "--n_cells", "2", "--model", "nonesuch"], ["info", "nonesuch"],
    ],
    "here.h5ad": [["grn", "here.h5ad", "-o", "here.h5ad"], ["perturb", "here.h5ad", "-o", "here.h5ad"]],
    "exceeds": [["pretrain", "--train", "[here.h5ad]", "--out", "run", "--training.context", "9000"]],
}  # fmt: skip


def test_errors_come_before_heavy_packages_and_before_cells_are_read(tmp_path):
    """Files, outputs and arguments are looked at first, whatever the command."""
    (tmp_path / "here.h5ad").write_bytes(b"nothing that could be read")
    code = (
        "import sys, json\nfrom scdiva.cli import main\n"
        "codes = [main(words) for words in json.loads(sys.argv[1])]\n"
        "heavy = sorted({'torch', 'scanpy', 'anndata', 'pytorch_lightning', 'sklearn'} & set(sys.modules))\n"
        "sys.stdout.write(json.dumps([codes, heavy]))"
    )
    commands = [(word, words) for word, of in ERRORS.items() for words in of]
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps([words for _, words in commands])],
        capture_output=True, text=True, check=True, cwd=tmp_path,
    )  # fmt: skip
    codes, heavy = json.loads(done.stdout)
    assert codes == [1] * len(commands)
    assert heavy == []
    for (word, words), said in zip(commands, done.stderr.splitlines(), strict=True):
        assert said.startswith(f"scdiva {words[0]}: ")
        assert word in said
    assert [path.name for path in tmp_path.iterdir()] == ["here.h5ad"]


def test_markup_goes_and_values_are_written_as_in_yaml():
    text = "See :func:`~scdiva.tl.embed`, :meth:`its own <x.y>` [1]_; ``None`` or\n    `True` of `a_b`. Nonesuch."
    assert plain(text) == "See embed, its own; null or true of a_b. Nonesuch."


def test_a_description_that_leads_on_is_followed(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    assert arguments(sd.tl.embed_file)["device"] == "As in embed."
    assert arguments(sd.tl.embed)["device"] in helped(capsys, "embed")
