"""Location of models: bundled, in a folder, or on the Hugging Face Hub, with verified checksums.

huggingface_hub does the transfer, with its cache (one copy for all processes, locked during a download), log-in and the
variables `HF_HUB_OFFLINE`, `HF_HOME` and `HF_ENDPOINT`.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scdiva._checks import from_extra
from scdiva._constants import DEFAULT_MODEL
from scdiva._files import beside
from scdiva.models._folder import CARD, CHECKSUMS, CONFIG, SUMMED, read_checked, read_config, read_sums, write_sums

if TYPE_CHECKING:
    from scdiva.models.scdiva import ScDiVa

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
        If there is no such model; the message lists the bundled names.
    """
    if isinstance(model, str) and model.startswith(SCHEME):
        return fetch(model)
    if isinstance(model, str) and model in available():
        return _BUNDLED / model
    folder = Path(model).expanduser()
    if folder.is_file():
        raise NotADirectoryError(f"no model {os.fspath(model)!r}: it is a file, and a model is a folder.")
    if not folder.is_dir():
        if (kept := beside(folder, "old")).is_dir():
            raise FileNotFoundError(
                f"no model {os.fspath(model)!r}, but {os.fspath(kept)!r}: a save was cut off as it put a new model "
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
        If the Hub refuses.
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
        raise ValueError(f"{address}: {error}. To fetch it anew: {command}") from error
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
        raise ValueError(f'{address!r} is no address of a model: write "hf://owner/name" or "hf://owner/name@revision"')
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
        raise ValueError(f"{address!r} is no address of a model: {_first_line(error)}") from error
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
