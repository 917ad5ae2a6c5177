"""Where models are: bundled, in a folder, on the Hugging Face Hub, from which they are fetched with their sums checked.

What goes over the wire is huggingface_hub's: its cache (one copy for all processes, under a lock while a file comes),
its log-in, its `HF_HUB_OFFLINE`, `HF_HOME` and `HF_ENDPOINT`.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scdiva._checks import from_extra
from scdiva._constants import DEFAULT_MODEL
from scdiva.models._folder import CHECKSUMS, CONFIG, SUMMED, read_checked, read_sums

_BUNDLED = Path(__file__).parents[1] / "checkpoints"
SCHEME = "hf://"
TAG = "scdiva"
"""By which the Hub finds models of this package."""
FRONT = f"---\nlibrary_name: {TAG}\ntags:\n- {TAG}\n- single-cell\n- biology\n---\n\n"
"""Head of a card, by which the Hub files it."""


def find_model(model: str | os.PathLike[str] = DEFAULT_MODEL) -> Path:
    """Find a model's folder; see `load_model` for what `model` may be.

    Parameters
    ----------
    model
        A bundled name, a folder, or ``"hf://owner/name"``, which is downloaded to the hub's own cache.

    Returns
    -------
    Path
        The folder.

    Raises
    ------
    FileNotFoundError
        If there is none; the message lists the bundled names.
    """
    if isinstance(model, str) and model.startswith(SCHEME):
        return fetch(model)
    if isinstance(model, str) and model in bundled_models():
        return _BUNDLED / model
    folder = Path(model).expanduser()
    if folder.is_file():
        raise NotADirectoryError(f"no model {os.fspath(model)!r}: it is a file, and a model is a folder.")
    if not folder.is_dir():
        if kept := sorted(folder.parent.glob(f".{folder.name}.*.old")):
            raise FileNotFoundError(
                f"no model {os.fspath(model)!r}, but {os.fspath(kept[-1])!r}: a save was cut off as it put a new model "
                "in the place of this one. Rename it."
            )
        raise FileNotFoundError(
            f"no model {os.fspath(model)!r}: there is no such folder, the bundled models are "
            f'{", ".join(bundled_models()) or "none"}, and a model on the Hugging Face Hub is written "hf://owner/name"'
        )
    return folder


def bundled_models() -> list[str]:
    """List the models that come with the package.

    Returns
    -------
    list of str
        Names that `load_model` takes.
    """
    return sorted(path.parent.name for path in _BUNDLED.glob(f"*/{CONFIG}"))


def available(owner: str | None = None) -> list[str]:
    """List the models that can be loaded by name.

    Parameters
    ----------
    owner
        Also ask the Hub which models with the tag of this package this user or organisation has. None asks nobody.

    Returns
    -------
    list of str
        What :func:`load_model` takes: bundled names; addresses of models that the Hub's cache holds, which load without
        a connection; and those of `owner`.

    Raises
    ------
    ConnectionError, PermissionError
        If `owner` is given and the Hub can't be reached, or refuses.
    ImportError
        If `owner` is given and huggingface_hub is not installed.

    Examples
    --------
    >>> import scdiva as sd
    >>> sd.models.available()[0]
    'scdiva-mini'
    >>> model = sd.models.load("scdiva-mini")
    """
    found = [*bundled_models(), *cached(), *(of_owner(owner) if owner is not None else [])]
    return list(dict.fromkeys(found))


def fetch(address: str) -> Path:
    """Fetch a model's five files into the Hub's cache, or find them there, and check them.

    Parameters
    ----------
    address
        ``"hf://owner/name"``, or ``"hf://owner/name@revision"`` with a branch, tag or commit.

    Returns
    -------
    Path
        The folder in the cache. Without a connection it is what the cache holds of that revision.

    Raises
    ------
    ValueError
        If that is no address, or a file does not match its sum.
    FileNotFoundError
        If the Hub has no such model or revision, or can't be reached and the cache does not hold it.
    PermissionError
        If the Hub refuses.
    ImportError
        If huggingface_hub is not installed.
    """
    repository, revision = parsed(address)
    hub = client(address)
    with _said_in_one_line(address):
        folder = Path(hub.snapshot_download(repository, revision=revision, allow_patterns=[*SUMMED, CHECKSUMS]))
    anew = f"huggingface_hub.snapshot_download({repository!r}, revision={revision!r}, force_download=True)"
    try:
        sums = read_sums(folder)
        for name in SUMMED:
            read_checked(folder, name, sums)
    except ValueError as error:
        raise ValueError(f"{address}: {error}. To fetch it anew: {anew}") from error
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{address} holds no model of scdiva, or only a part of one: {error}") from error
    return folder


def send(folder: Path, address: str, *, private: bool, message: str | None) -> str:
    """Put a model folder onto the main branch of a repository, which is made if need be.

    Parameters
    ----------
    folder, address, private, message
        As for :func:`scdiva.models.push`.

    Returns
    -------
    str
        The address with the commit's hash.
    """
    repository, _ = parsed(address)
    hub = client(address)
    with _said_in_one_line(address, writing=True), warnings.catch_warnings():
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


def of_owner(owner: str) -> list[str]:
    """List the models of this package that a user or organisation has on the Hub."""
    address = f"{SCHEME}{owner}"
    hub = client(address)
    with _said_in_one_line(address):
        return sorted(f"{SCHEME}{info.id}" for info in hub.HfApi().list_models(author=owner, filter=TAG))


def parsed(address: str) -> tuple[str, str | None]:
    """Split an address into repository and revision."""
    repository, _, revision = str(address).removeprefix(SCHEME).partition("@")
    if not str(address).startswith(SCHEME) or repository.count("/") != 1 or not all(repository.split("/")):
        raise ValueError(f'{address!r} is no address of a model: write "hf://owner/name" or "hf://owner/name@revision"')
    return repository, revision or None


def client(address: str) -> Any:
    """Give huggingface_hub; ImportError if it is not installed."""
    return from_extra("huggingface_hub", "hub", f"{address} needs huggingface_hub")


@contextlib.contextmanager
def _said_in_one_line(address: str, *, writing: bool = False) -> Iterator[None]:
    """Turn what huggingface_hub raises, with its advice over many lines, into one line that says what to do."""
    from huggingface_hub import errors

    # of a broken connection the library beneath tells, which changed: requests once, httpx now
    broken: Any = (OSError, errors.HfHubHTTPError.__bases__[0])
    try:
        yield
    except errors.HFValidationError as error:
        raise ValueError(f"{address!r} is no address of a model: {_first_line(error)}") from error
    except errors.LocalEntryNotFoundError as error:  # first: once it was an HfHubHTTPError
        raise FileNotFoundError(
            f"{address} is not in the cache, and the Hub can't be reached: connect once, or copy the model's folder "
            "here and pass its path"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise FileNotFoundError(f"{address}: the model is there, that revision is not.") from error
    except errors.GatedRepoError as error:
        raise PermissionError(f"{address} is gated: ask for access on its page, then log in: hf auth login") from error
    except errors.RepositoryNotFoundError as error:
        raise FileNotFoundError(
            f"{address}: the Hub has no such model, or it is private: check the name, or log in: hf auth login"
        ) from error
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        if status in (401, 403):
            raise PermissionError(
                f"{address}: the Hub refuses ({status}): log in with a token that may do this: hf auth login"
            ) from error
        raise ConnectionError(f"{address}: the Hub answered {status}: try again later") from error
    except broken as error:
        what = "put there" if writing else "fetched"
        raise ConnectionError(f"{address} can't be {what}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def cached() -> list[str]:
    """List the models of this package that the Hub's cache holds whole: by branch or tag, else by commit."""
    try:
        import huggingface_hub
    except ImportError:
        return []
    try:
        # named, as its own default is settled at import and need not be where downloads go
        repositories = huggingface_hub.scan_cache_dir(huggingface_hub.constants.HF_HUB_CACHE).repos
    except (OSError, ValueError, huggingface_hub.CacheNotFound):
        return []
    found = []
    for repository in repositories:
        for revision in repository.revisions if repository.repo_type == "model" else ():
            if not {file.file_name for file in revision.files} >= {*SUMMED, CHECKSUMS}:
                continue
            names = sorted(revision.refs) or [revision.commit_hash]
            found += [f"{SCHEME}{repository.repo_id}" + ("" if name == "main" else f"@{name}") for name in names]
    return sorted(found)
