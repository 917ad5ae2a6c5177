"""Files of saved models and fitted objects: their names, checksums, checked reading and atomic writing.

A model is a folder of plain files::

    config.json          format version, ScDiVaConfig, the vocabulary's fingerprint, the author's metadata
    model.safetensors    the weights, stored as float32, float16 or bfloat16
    vocabulary.safetensors   the genes (row i is token i + 3) with their names and their corpus entropy
    README.md            the model card
    SHA256SUMS           checksums of the four files above, as `sha256sum -c` reads them

Fitted objects, annotators and perturbation models, are folders with a model in them::

    model/               the model
    KIND.json            format version and settings
    KIND.safetensors     arrays
    SHA256SUMS           checksums of these two and of model/SHA256SUMS

:mod:`scdiva.models.pretrained` loads both. This module does not import torch until a model is saved.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scdiva._checks import from_extra, printable, refuse_unwritable
from scdiva._constants import DEFAULT_MODEL
from scdiva._files import MOST_TEXT, beside, output_path, parse_json, read_bytes, whole_or_not
from scdiva._version import __version__
from scdiva.tokenizer.vocabulary import MOST_BYTES

if TYPE_CHECKING:
    from torch import Tensor

    from scdiva.models.scdiva import ScDiVa
    from scdiva.tokenizer.vocabulary import Vocabulary


FORMAT, FORMAT_VERSION = "scdiva", 1
CONFIG, WEIGHTS, VOCABULARY = "config.json", "model.safetensors", "vocabulary.safetensors"
CARD, CHECKSUMS = "README.md", "SHA256SUMS"
MODEL = "model"
"""Folder of the model in the folder of a fitted object."""
DTYPES = ("float32", "float16", "bfloat16")
"""Data types of stored weights."""
SUMMED = (CARD, CONFIG, WEIGHTS, VOCABULARY)
"""Files of a model that have a checksum."""
LONGEST_SUMS = 4096
"""Maximum number of characters of SHA256SUMS, which has four lines."""
CARD_VALUE = 300
"""Characters of the longest metadata value that the default model card repeats."""
_HOLDS = {
    "annotator": "an annotator: scdiva.tl.annotate(adata, model=folder) takes it",
    "perturbation_model": "a fitted perturbation model: scdiva.tl.predict_perturbation(adata, model=folder) takes it",
    "model": "a model: scdiva.tl.embed(adata, model=folder) takes it",
    "run": "a run of scdiva pretrain",
}


def kind_of(folder: Path) -> str | None:
    """Kind of a folder by the names of its files: "model", "annotator", "perturbation_model", "run", or None."""
    for kind in ("annotator", "perturbation_model"):
        if any((folder / f"{kind}.{ending}").is_file() for ending in ("json", "safetensors")):
            return kind
    for kind, at in (("model", folder), ("run", folder / MODEL)):
        if (at / CONFIG).is_file() and (at / CHECKSUMS).is_file():
            return kind
    return None


def in_words(kind: str) -> str:
    """Kind as it is written in messages."""
    return kind.replace("_", " ")


def write_sums(folder: Path, names: Iterable[str]) -> None:
    """Write the checksums of these files of a folder to SHA256SUMS, as `sha256sum -c` reads them."""
    lines = [f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
    (folder / CHECKSUMS).write_text("".join(lines), encoding="utf-8")


def read_sums(folder: Path, names: Sequence[str] = SUMMED, kind: str = "model") -> dict[str, str]:
    """Read SHA256SUMS of a saved object of this kind, which must list exactly these files, each once.

    Raises
    ------
    FileNotFoundError
        If one of the files is missing.
    ValueError
        If other files are listed, or the folder is of another kind.
    """
    if (actual_kind := kind_of(folder)) not in (None, kind):
        inner = f". The model in it is {str(folder / MODEL)!r}" if kind == "model" else ""
        raise ValueError(
            f"{str(folder)!r} is not a saved {in_words(kind)}, it holds {_HOLDS[str(actual_kind)]}{inner}."
        )
    for name in (*names, CHECKSUMS):
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"{folder} lacks {name}: the folder of a saved {in_words(kind)} holds {CHECKSUMS}, {', '.join(names)}."
            )
    with (folder / CHECKSUMS).open(encoding="utf-8", errors="replace") as file:
        text = file.read(LONGEST_SUMS)
    pairs = [line.split("  ", 1) for line in text.splitlines()]
    sums = {pair[-1]: pair[0] for pair in pairs}
    if sorted(sums) != sorted(names) or len(pairs) != len(names):
        raise ValueError(f"{folder / CHECKSUMS} must list {', '.join(names)}, each once, and nothing else")
    return sums


def read_checked(folder: Path, name: str, sums: dict[str, str]) -> bytes:
    """Read a file and verify its checksum."""
    limit = MOST_BYTES if name == VOCABULARY else MOST_TEXT
    if name.endswith(".safetensors") and name != VOCABULARY:  # weights must fit into memory
        limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    data = read_bytes(folder / name, limit)
    if hashlib.sha256(data).hexdigest() != sums[name]:
        raise ValueError(
            f"{folder / name} does not match {CHECKSUMS}: it is damaged, cut short, swapped or was edited; "
            "fetch the folder again, or save it again"
        )
    return data


def read_json(file: Path, data: bytes, kind: str = FORMAT) -> dict[str, Any]:
    """Parse the JSON file of a model or fitted object; its format and version are checked first."""
    content = parse_json(file, data)
    if not isinstance(content, dict) or content.get("format") != kind:
        raise ValueError(f"{file} has no entry format = {kind!r}: it does not describe what was saved as that")
    if content.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{file} has format version {content.get('format_version')!r:.80} (written by scdiva "
            f"{content.get('scdiva_version')!s:.80}); scdiva {__version__} reads version {FORMAT_VERSION}: "
            "update scdiva, or ask for it in this format"
        )
    return content


def read_config(folder: Path, sums: dict[str, str]) -> dict[str, Any]:
    """Read and check config.json of a model."""
    config = read_json(folder / CONFIG, read_checked(folder, CONFIG, sums))
    keys = {"format", "format_version", "scdiva_version", "model", "n_parameters", "dtype", "vocabulary", "metadata"}
    if config.keys() != keys:
        raise ValueError(
            f"{folder / CONFIG} must hold {', '.join(sorted(keys))}, not {printable(', '.join(sorted(config))[:300])}"
        )
    if wrong := [key for key in ("model", "vocabulary", "metadata") if not isinstance(config[key], dict)]:
        raise ValueError(f"{folder / CONFIG}: the entry {wrong[0]!r} must be an object, not {config[wrong[0]]!r:.80}")
    return config


@contextlib.contextmanager
def written_beside(folder: Path, overwrite: bool, kind: str) -> Iterator[Path]:
    """Yield a temporary folder that replaces `folder` when the block ends without an error; else it is deleted.

    Parameters
    ----------
    folder
        The folder to write.
    overwrite
        Whether to replace an existing folder of this kind.
    kind
        Kind of the saved object, see :func:`kind_of`.

    Raises
    ------
    FileExistsError
        If `folder` exists and must not be replaced, is of another kind, or contains files that scdiva did not write.
    """
    check_folder(folder, overwrite, kind)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with whole_or_not(folder) as part:
        part.mkdir()
        yield part


def check_folder(folder: Path, overwrite: bool, kind: str) -> None:
    """Check that a saved object can be written to a folder; arguments and errors as for :func:`written_beside`."""
    same_kind = kind_of(folder) == kind
    if folder.exists() and not (overwrite and same_kind):
        hint = "pass overwrite=True" if same_kind else f"it is not a saved {in_words(kind)}; choose another path"
        raise FileExistsError(f"{str(folder)!r} exists already: {hint}.")
    refuse_unwritable(folder)
    if folder.is_symlink() or not folder.is_dir():  # a link is replaced itself
        return
    written = {*SUMMED, CHECKSUMS}
    if kind != "model":
        written = {f"{MODEL}/{name}" for name in written} | {f"{kind}.json", f"{kind}.safetensors", CHECKSUMS, MODEL}
    held = (path for path in folder.rglob("*") if path.name != ".DS_Store")
    if unexpected := sorted(name for path in held if (name := path.relative_to(folder).as_posix()) not in written):
        raise FileExistsError(
            f"{str(folder)!r} contains {len(unexpected)} files or folders that scdiva did not write, the first is "
            f"{unexpected[0]!r}: overwrite=True would delete them. Move them, or choose another path."
        )


def save_model(
    model: ScDiVa,
    vocabulary: Vocabulary,
    path: str | os.PathLike[str],
    card: str | None = None,
    metadata: dict[str, Any] | None = None,
    *,
    dtype: str = "float32",
    overwrite: bool = False,
) -> Path:
    """Write a model, its vocabulary and its card to a folder.

    The folder is written atomically.

    Parameters
    ----------
    model
        The model; not changed.
    vocabulary
        The `model.config.n_genes` genes of the model with their entropy.
    path
        The folder to create, with its parents.
    card
        Markdown for README.md; None writes a short model card from the configuration and `metadata`.
    metadata
        Further entries of config.json, such as the corpus and the number of training steps. Plain JSON values.
    dtype
        Data type of the stored weights: ``"float32"``, ``"float16"`` or ``"bfloat16"``. They are loaded as float32.
    overwrite
        Whether to replace an existing model folder. Anything else is never replaced.

    Returns
    -------
    Path
        The folder.

    Raises
    ------
    FileExistsError
        If `path` exists and is not a saved model, contains files that scdiva did not write, or `overwrite` is False.
    ValueError
        If `path` is a URL, the vocabulary is not the model's, weights are not finite (or not in `dtype`), or `metadata`
        is not JSON.

    Examples
    --------
    >>> import scdiva as sd
    >>> model = sd.models.load_model()
    >>> folder = sd.models.save_model(model, model.vocabulary, "my-model")
    >>> sd.models.load_model("my-model").config == model.config
    True
    """
    from safetensors.torch import save

    folder = output_path(path, "path")
    if vocabulary.n_genes != model.config.n_genes:
        raise ValueError(
            f"the model was built for {model.config.n_genes:,} genes and the vocabulary holds {vocabulary.n_genes:,}: "
            "pass the vocabulary that it was trained with"
        )
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: weights are stored as one of {', '.join(DTYPES)}")
    weights = {name: _stored(name, tensor, dtype) for name, tensor in model.state_dict().items()}
    config = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "scdiva_version": __version__,
        "model": model.config.stored(),
        "n_parameters": model.n_parameters,
        "dtype": dtype,
        "vocabulary": {"n_genes": vocabulary.n_genes, "fingerprint": vocabulary.fingerprint},
        "metadata": metadata or {},
    }
    try:
        text = json.dumps(config, indent=2, sort_keys=True, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"metadata must hold plain JSON values (str, int, finite float, bool, list, dict): {error}"
        ) from error

    with written_beside(folder, overwrite, "model") as part:
        (part / CONFIG).write_text(text, encoding="utf-8")
        (part / WEIGHTS).write_bytes(save(weights, metadata={"format": "pt"}))
        vocabulary.write(part / VOCABULARY)
        (part / CARD).write_text(_default_card(config) if card is None else card, encoding="utf-8")
        write_sums(part, SUMMED)
    return folder


def _stored(name: str, tensor: Tensor, dtype: str) -> Tensor:
    """Copy a tensor to the CPU in the dtype in which it is stored; ValueError if a value is not finite there."""
    import torch

    value = tensor.detach().cpu().contiguous()
    if not value.is_floating_point():
        return value.clone()
    if bad := int((~torch.isfinite(value)).sum()):
        raise ValueError(f"{bad:,} of {value.numel():,} values of {name!r} are NaN or infinite: the model is not saved")
    value = value.to(getattr(torch, dtype), copy=True)
    if bad := int((~torch.isfinite(value)).sum()):
        raise ValueError(f"{bad:,} values of {name!r} are too large for {dtype}: store them as bfloat16 or float32")
    return value


def _default_card(config: dict[str, Any]) -> str:
    """Write a short model card from the configuration."""
    fields = {**config["model"], **config["metadata"]}
    lines = [
        f"- {name}: {value if len(str(value)) <= CARD_VALUE else f'see {CONFIG}'}" for name, value in fields.items()
    ]
    return (
        "# An scdiva model\n\n"
        f"{config['n_parameters']:,} parameters, {config['vocabulary']['n_genes']:,} genes; written by scdiva "
        f"{config['scdiva_version']}.\n\n"
        "Load it with `scdiva.models.load_model(folder)`; embed cells with `scdiva.tl.embed(adata, model=folder)`.\n\n"
        "## Configuration\n\n" + "\n".join(lines) + "\n"
    )


# --- Hugging Face Hub -------------------------------------------------------------------------------------------------
_BUNDLED = Path(__file__).parents[1] / "checkpoints"
SCHEME = "hf://"
TAG = "scdiva"
"""Tag of the models of this package on the Hub."""
FRONT = f"---\nlibrary_name: {TAG}\ntags:\n- {TAG}\n- single-cell\n- biology\n---\n\n"
"""Front matter of a model card."""


def find_model(model: str | os.PathLike[str] = DEFAULT_MODEL) -> Path:
    """Find the folder of a model.

    Parameters
    ----------
    model
        A bundled name, a folder, or ``"hf://owner/name"``, which is downloaded to the cache of the Hub.

    Returns
    -------
    Path
        The folder.

    Raises
    ------
    FileNotFoundError
        If the model does not exist. The message lists the bundled models.
    """
    if isinstance(model, str) and model.startswith(SCHEME):
        return fetch(model)
    if isinstance(model, str) and model in available():
        return _BUNDLED / model
    folder = Path(model).expanduser()
    if folder.is_file():
        raise NotADirectoryError(f"no model {os.fspath(model)!r}: it is a file, and a model is a folder.")
    if not folder.is_dir():
        if (backup := beside(folder, "old")).is_dir():
            raise FileNotFoundError(
                f"no model {os.fspath(model)!r}, but {os.fspath(backup)!r}: a save was cut off as it put a new model "
                "in the place of this one. Rename it."
            )
        raise FileNotFoundError(
            f"no model {os.fspath(model)!r}: there is no such folder, the bundled models are "
            f'{", ".join(available()) or "none"}, and a model on the Hugging Face Hub is written "hf://owner/name"'
        )
    return folder


def available() -> list[str]:
    """Names of the bundled models.

    Returns
    -------
    list of str
        Names for :func:`load_model`.

    Examples
    --------
    >>> import scdiva as sd
    >>> sd.models.available()
    ['scdiva-mini', 'scdiva-paper-mini']
    >>> model = sd.models.load("scdiva-mini")
    """
    return sorted(path.parent.name for path in _BUNDLED.glob(f"*/{CONFIG}"))


def fetch(address: str) -> Path:
    """Download the five files of a model to the cache of the Hub, unless they are there, and verify them.

    Parameters
    ----------
    address
        ``"hf://owner/name"``, or ``"hf://owner/name@revision"`` with a branch, tag or commit.

    Returns
    -------
    Path
        The folder in the cache.

    Raises
    ------
    ValueError
        If the address is invalid, or a file does not match its checksum.
    FileNotFoundError
        If the Hub has no such model or revision, or can't be reached and the cache lacks it.
    PermissionError
        If the Hub denies access.
    ImportError
        If huggingface_hub is not installed.
    """
    repository, revision = parsed(address)
    hub = _client(address)
    with _hub_errors(address):
        folder = Path(hub.snapshot_download(repository, revision=revision, allow_patterns=[*SUMMED, CHECKSUMS]))
    command = f"huggingface_hub.snapshot_download({repository!r}, revision={revision!r}, force_download=True)"
    try:
        sums = read_sums(folder)
        for name in SUMMED:
            read_checked(folder, name, sums)
    except ValueError as error:
        raise ValueError(f"{address}: {error}. To download it again: {command}") from error
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{address} holds no model of scdiva, or only a part of one: {error}") from error
    return folder


def push(
    model: ScDiVa | str | os.PathLike[str],
    address: str,
    *,
    card: str | None = None,
    private: bool = False,
    message: str | None = None,
) -> str:
    """Upload a model to the Hugging Face Hub, with its model card.

    Requires a log-in (``hf auth login``, or the variable `HF_TOKEN`). The repository is created if needed; in an
    existing one a new commit replaces the files of the model, and earlier revisions remain.

    Parameters
    ----------
    model
        A model with its vocabulary (from :func:`load_model`), a model folder, or the name of a bundled model. Its
        checksums are verified before the upload.
    address
        ``"hf://owner/name"``; the model is uploaded to the main branch.
    card
        Markdown for README.md; None: that of the folder, or for a loaded model the short one of :func:`save_model`.
        Front matter with the tag of this package is added if it is missing.
    private
        Whether a new repository is private.
    message
        Commit message.

    Returns
    -------
    str
        Address of this revision, ``"hf://owner/name@<hash>"``.

    Raises
    ------
    ValueError
        If `address` is invalid or names a revision, the model has no vocabulary, or its folder is damaged.
    FileNotFoundError
        If there is no such model, or the Hub does not know the owner.
    PermissionError
        If you are not logged in, or may not write there.
    ConnectionError
        If the Hub can't be reached.
    ImportError
        If huggingface_hub is not installed.

    Examples
    --------
    >>> sd.models.push(model, "hf://lab/atlas", card="# Our atlas ...")  # doctest: +SKIP
    """
    repository, revision = parsed(address)
    if revision is not None:
        raise ValueError(f"{address!r}: models go to the main branch; leave @{revision} out.")
    hub = _client(address)  # before any work
    with tempfile.TemporaryDirectory(prefix="scdiva-push-") as beside:
        folder = Path(beside) / "model"
        if isinstance(model, str | os.PathLike):
            source = find_model(model)
            sums = read_sums(source)
            read_config(source, sums)
            folder.mkdir()
            for name in SUMMED:
                (folder / name).write_bytes(read_checked(source, name, sums))
        else:
            model.save(folder)
        text = (folder / CARD).read_text(encoding="utf-8") if card is None else card
        (folder / CARD).write_text(text if text.startswith("---\n") else FRONT + text, encoding="utf-8")
        write_sums(folder, SUMMED)
        with _hub_errors(address), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*about to commit a data file.*")  # the vocabulary
            api = hub.HfApi()
            api.create_repo(repository, private=private, exist_ok=True)
            commit = api.upload_folder(
                repo_id=repository,
                folder_path=folder,
                commit_message=message or f"Model of {TAG}",
                allow_patterns=[*SUMMED, CHECKSUMS],
            )
    return f"{SCHEME}{repository}@{commit.oid}"


def parsed(address: str) -> tuple[str, str | None]:
    """Split an address into repository and revision."""
    repository, _, revision = str(address).removeprefix(SCHEME).partition("@")
    if not str(address).startswith(SCHEME) or repository.count("/") != 1 or not all(repository.split("/")):
        raise ValueError(
            f'{address!r} is not the address of a model: write "hf://owner/name" or "hf://owner/name@revision"'
        )
    return repository, revision or None


def _client(address: str) -> Any:
    """Import huggingface_hub; ImportError with the extra if it is not installed."""
    return from_extra("huggingface_hub", "hub", f"{address} needs huggingface_hub")


@contextlib.contextmanager
def _hub_errors(address: str) -> Iterator[None]:
    """Replace errors of huggingface_hub by built-in ones with a message of one line."""
    from huggingface_hub import errors

    # connection errors come from requests or httpx, depending on the version
    broken: Any = (OSError, errors.HfHubHTTPError.__bases__[0])
    absent = (errors.LocalEntryNotFoundError, errors.RevisionNotFoundError, errors.RepositoryNotFoundError)
    try:
        yield
    except errors.HFValidationError as error:
        raise ValueError(f"{address!r} is not the address of a model: {_first_line(error)}") from error
    except broken as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(error, absent) and not isinstance(error, errors.GatedRepoError):
            raise FileNotFoundError(
                f"{address} is not there, or it is private, or the Hub can't be reached and the cache does not hold "
                "it: check name and revision, log in (hf auth login), connect once, or pass a folder"
            ) from error
        if status in (401, 403):
            raise PermissionError(
                f"{address}: the Hub refuses ({status}): ask for access on its page, or log in with a token that may "
                "do this: hf auth login"
            ) from error
        raise ConnectionError(f"{address}: the Hub can't be reached, try again later: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
