"""Models on the Hugging Face Hub: fetched with their sums checked, put there with their card, listed.

What goes over the wire is huggingface_hub's: its cache (one copy for all processes, under a lock while a file comes),
its log-in, its `HF_HUB_OFFLINE`, `HF_HOME` and `HF_ENDPOINT`.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scdiva._extras import from_extra
from scdiva.models._folder import CARD, CHECKSUMS, SUMMED, read_checked, read_config, read_sums, write_sums

if TYPE_CHECKING:
    from scdiva.models.scdiva import ScDiVa

SCHEME = "hf://"
TAG = "scdiva"
"""By which the Hub finds models of this package."""
_FRONT = f"---\nlibrary_name: {TAG}\ntags:\n- {TAG}\n- single-cell\n- biology\n---\n\n"


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
    repository, revision = _parsed(address)
    hub = _client(address)
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


def push(
    model: ScDiVa | str | os.PathLike[str],
    address: str,
    *,
    card: str | None = None,
    private: bool = False,
    message: str | None = None,
) -> str:
    """Put a model on the Hugging Face Hub, with its card.

    You must be logged in (``hf auth login``, or the variable `HF_TOKEN`). The repository is made if need be; in one
    that is there, a new commit replaces the model's files, and earlier ones stay under their revisions.

    Parameters
    ----------
    model
        A model with its vocabulary (as :func:`load_model` gives it), a model folder, or the name of a bundled model.
        The sums are checked before anything is sent.
    address
        ``"hf://owner/name"``; it goes to the main branch.
    card
        Markdown for its README.md; None takes the folder's, or for a loaded model the short one that
        :func:`save_model` writes. A card without a head for the Hub gets one, with the tag by which :func:`available`
        finds it.
    private
        Whether a new repository is private.
    message
        Of the commit.

    Returns
    -------
    str
        The address with the commit's hash, ``"hf://owner/name@<hash>"``: what loads this very model from now on.

    Raises
    ------
    ValueError
        If `address` is none or names a revision, the model has no vocabulary, or its folder is damaged.
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
    repository, revision = _parsed(address)
    if revision is not None:
        raise ValueError(f"{address!r}: models go to the main branch; leave @{revision} out.")
    hub = _client(address)
    with tempfile.TemporaryDirectory(prefix="scdiva-push-") as beside:
        folder = _to_send(model, Path(beside) / "model", card)
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
    from scdiva.models.pretrained import bundled_models

    found = [*bundled_models(), *_cached()]
    if owner is not None:
        address = f"{SCHEME}{owner}"
        hub = _client(address)
        with _said_in_one_line(address):
            found += sorted(f"{SCHEME}{info.id}" for info in hub.HfApi().list_models(author=owner, filter=TAG))
    return list(dict.fromkeys(found))


def _parsed(address: str) -> tuple[str, str | None]:
    """Split an address into repository and revision."""
    repository, _, revision = str(address).removeprefix(SCHEME).partition("@")
    if not str(address).startswith(SCHEME) or repository.count("/") != 1 or not all(repository.split("/")):
        raise ValueError(f'{address!r} is no address of a model: write "hf://owner/name" or "hf://owner/name@revision"')
    return repository, revision or None


def _client(address: str) -> Any:
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


def _to_send(model: Any, folder: Path, card: str | None) -> Path:
    """Lay out the folder that is sent: checked, with a card that the Hub can read."""
    from scdiva.models.pretrained import find_model, save_model
    from scdiva.models.scdiva import ScDiVa

    if isinstance(model, ScDiVa):
        vocabulary = getattr(model, "vocabulary", None)
        if vocabulary is None:
            raise ValueError("this model has no vocabulary: set `model.vocabulary`, or save it and push the folder")
        save_model(model, vocabulary, folder, card, getattr(model, "metadata", None))
    else:
        found = find_model(model)
        sums = read_sums(found)
        read_config(found, sums)
        folder.mkdir(parents=True)
        for name in SUMMED:
            (folder / name).write_bytes(read_checked(found, name, sums))
    text = (folder / CARD).read_text(encoding="utf-8") if card is None else card
    if not text.startswith("---\n"):
        text = _FRONT + text
    (folder / CARD).write_text(text, encoding="utf-8")
    write_sums(folder, SUMMED)
    return folder


def _cached() -> list[str]:
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
