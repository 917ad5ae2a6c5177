"""Load models and fitted objects from their folders, strictly and without pickle.

:mod:`scdiva.models.storage` describes the files. Nothing is repaired or filled in on loading: a missing, damaged,
swapped or surplus file, tensor or gene raises an error that names it. A model with one random layer would return
embeddings that look plausible.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar, overload

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse_safetensors
from safetensors.torch import save
from torch import Tensor
from torch.overrides import TorchFunctionMode

from scdiva._checks import printable
from scdiva._constants import DEFAULT_MODEL
from scdiva._files import html_table, output_path
from scdiva._settings import logger, settings
from scdiva._version import __version__
from scdiva.models.config import ScDiVaConfig
from scdiva.models.scdiva import ScDiVa
from scdiva.models.storage import (
    CARD,
    CHECKSUMS,
    CONFIG,
    DTYPES,
    FORMAT_VERSION,
    MODEL,
    SUMMED,
    VOCABULARY,
    WEIGHTS,
    find_model,
    in_words,
    kind_of,
    read_checked,
    read_config,
    read_json,
    read_sums,
    write_sums,
    written_beside,
)
from scdiva.tokenizer.vocabulary import Vocabulary


# --- models -----------------------------------------------------------------------------------------------------------
def load_model(model: str | os.PathLike[str] | ScDiVa = DEFAULT_MODEL, *, device: str | None = None) -> ScDiVa:
    """Load a model, ready to embed cells.

    Parameters
    ----------
    model
        The name of a bundled model (see `available`), a folder that `save_model` wrote, ``"hf://owner/name"`` (or
        ``"hf://owner/name@revision"``) on the Hugging Face Hub, or a loaded model, which is returned after a move to
        `device` if one is passed.
    device
        A torch device; None: `settings.device`.

    Returns
    -------
    ScDiVa
        In float32 and evaluation mode, with the attributes `config`, `vocabulary` (the `Vocabulary` of the training)
        and `metadata` (a dict). The state of torch's random generators does not change.

    Raises
    ------
    FileNotFoundError
        If there is no such model, its folder lacks a file, or the Hub can't be reached and its cache lacks the model.
    PermissionError, ConnectionError
        If the Hub denies access, or a request to it fails.
    ValueError
        If a file is damaged or was changed, the format is newer than this package, a tensor is missing, surplus or of
        the wrong shape, or the vocabulary is not that of the model. The message names the file.
    TypeError
        If `model` is another object, such as an annotator.
    ImportError
        If `model` starts with ``hf://`` and huggingface_hub is not installed.

    Examples
    --------
    >>> import scdiva as sd
    >>> model = sd.models.load_model()
    >>> model.config.n_layers, model.vocabulary.n_genes
    (4, 19623)
    """
    if isinstance(model, ScDiVa):
        model.known_vocabulary()
        return model if device is None else model.to(settings.resolve_device(device))
    if not isinstance(model, str | os.PathLike):
        raise TypeError(f"model must be a loaded model, a folder or a name, got {type(model).__name__}.")

    target = settings.resolve_device(device)
    return _copied(_cached_network(model)).to(target)


def load_for(model: str | os.PathLike[str] | ScDiVa, device: str) -> ScDiVa:
    """Load a model for a call that runs on a device and does not change the model.

    A loaded model is not moved. On the CPU, calls with the same name share one network, without a copy.
    """
    if not isinstance(model, str | os.PathLike):
        return load_model(model)
    network = _cached_network(model)
    return network if device == "cpu" else _copied(network).to(device)


_cache: dict[tuple[str, ...], tuple[ScDiVa, object]] = {}
"""The last loaded network, by its name and the checksums of its files, with its state after loading."""


def _cached_network(name: str | os.PathLike[str]) -> ScDiVa:
    """Network of a folder on the CPU, from the cache unless the files or the network have changed since."""
    folder = find_model(name)
    sums = read_sums(folder)
    config = read_config(folder, sums)
    data = {file: read_checked(folder, file, sums) for file in (WEIGHTS, CARD, VOCABULARY)}
    key = (os.fspath(name), *(sums[file] for file in SUMMED))
    network, state = _cache.get(key, (None, None))
    if network is None or _state(network) != state:
        with torch.inference_mode(False):  # tensors made in inference mode can't be trained
            network = _read_network(folder, config, data)
        network.origin = f"{name}, saved by scdiva {config['scdiva_version']}"
        logger.info("loaded the model in %s", folder)
    _cache.clear()
    if settings.keep_model:
        _cache[key] = network, _state(network)
    return network


def _state(network: ScDiVa) -> object:
    """Value that differs after any change of a network: its tensors, their versions and sums, and its attributes."""
    tensors = network.state_dict(keep_vars=True)
    versions = [  # the sum detects writes to x.data, which do not raise the version
        (name, x.data_ptr(), x._version, x.requires_grad, x.grad is None, float(x.detach().sum()))
        for name, x in tensors.items()
    ]
    return versions, network.training, network.blocks.micro_batches, repr(network.metadata), network.config


def _copied(network: ScDiVa) -> ScDiVa:
    with torch.inference_mode(False):
        return copy.deepcopy(network, {id(network.vocabulary): network.vocabulary})


def _read_network(folder: Path, config: dict[str, Any], data: dict[str, bytes]) -> ScDiVa:
    """Build the network from the contents of a folder's files."""
    vocabulary, expected = Vocabulary.read(folder / VOCABULARY, data[VOCABULARY]), config["vocabulary"]
    if {"n_genes": vocabulary.n_genes, "fingerprint": vocabulary.fingerprint} != expected:
        raise ValueError(
            f"{folder / VOCABULARY} is not the vocabulary that the model was trained with: it has {vocabulary.n_genes} "
            f"genes, fingerprint {vocabulary.fingerprint[:12]}, but {CONFIG} says {expected!s:.300}"
        )
    architecture = _model_config(folder, config)
    if architecture.n_genes != vocabulary.n_genes:
        raise ValueError(
            f"{folder}: {CONFIG} describes a model of {architecture.n_genes:,} genes, but {VOCABULARY} holds "
            f"{vocabulary.n_genes:,}"
        )
    network = _filled(architecture, data[WEIGHTS], folder / WEIGHTS)
    network.vocabulary, network.metadata = vocabulary, config["metadata"]
    return network.eval()


def _model_config(folder: Path, config: dict[str, Any]) -> ScDiVaConfig:
    """Architecture in config.json."""
    try:
        return ScDiVaConfig.from_dict(config["model"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{folder / CONFIG}: the entry 'model' is not a ScDiVaConfig of this version: {error}"
        ) from error


def _filled(config: ScDiVaConfig, data: bytes, file: Path) -> ScDiVa:
    """Build a network with stored weights; names and shapes are checked before memory is allocated."""
    stored = read_tensors(file, data, DTYPES)  # float64 may not fit into float32
    if config.n_layers > len(stored):
        raise ValueError(f"{file} lacks tensors: {CONFIG} describes {config.n_layers} layers, it holds {len(stored)}")
    try:
        network = without_memory(config)
    except ValueError as error:
        raise ValueError(f"{file.parent / CONFIG}: the entry 'model': {error}") from error
    expected = network.state_dict()
    for verb, names in (("lacks", expected.keys() - stored.keys()), ("has in excess", stored.keys() - expected.keys())):
        if names:
            raise ValueError(
                f"{file} {verb} {len(names)} tensors, by the model that {CONFIG} describes, first {min(names)!r:.80}"
            )
    for name, tensor in expected.items():
        value = stored[name]
        if value.shape != tensor.shape:
            raise ValueError(f"{file}: {name!r} has shape {tuple(value.shape)}, the model needs {tuple(tensor.shape)}")
        if value.is_floating_point() != tensor.is_floating_point():
            raise ValueError(f"{file}: {name!r} is stored as {value.dtype}, the model needs {tensor.dtype}")
        stored[name] = value.to(tensor.dtype, copy=True)  # the buffer of the file is read-only
    network.load_state_dict(stored, assign=True)
    return network


def read_tensors(file: Path, data: bytes, dtypes: Sequence[str] = (*DTYPES, "float64")) -> dict[str, Tensor]:
    """Parse safetensors; floating-point tensors must have one of these types and be finite."""
    try:
        tensors = parse_safetensors(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise ValueError(f"{file} is damaged or no safetensors file: {printable(f'{error!s:.300}')}") from error
    for name, value in tensors.items():
        if value.is_floating_point():
            if value.dtype not in {getattr(torch, dtype) for dtype in dtypes}:
                raise ValueError(f"{file}: {name!r:.80} is stored as {value.dtype}, not as {' or '.join(dtypes)}")
            if value.numel() and not torch.isfinite(torch.stack(value.aminmax())).all():
                raise ValueError(f"{file}: {name!r:.80} holds NaN or infinite values")
    return tensors


class _Undrawn(TorchFunctionMode):
    """Skip functions that fill tensors: on the meta device they have no effect, and torch would load its compiler."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name.endswith("_") and not name.endswith("__") and name != "requires_grad_":
            return args[0] if args else next(iter(kwargs.values()))
        return func(*args, **(kwargs or {}))


def without_memory(config: ScDiVaConfig) -> ScDiVa:
    """Build a network on the meta device, to check names, shapes and types of weights before memory is allocated.

    Parameters
    ----------
    config
        Architecture of any size; the runtime grows with `n_layers`.

    Raises
    ------
    ValueError
        If a size exceeds that of any tensor.
    """
    try:
        with torch.device("meta"), _Undrawn():
            return ScDiVa(config, generator=torch.Generator(device="cpu"))
    except (RuntimeError, OverflowError, TypeError, MemoryError) as error:
        line = next(iter(str(error).splitlines()), type(error).__name__)  # torch adds a trace
        raise ValueError(f"no network has these sizes: {line:.200}") from error


def fingerprint(model: ScDiVa) -> str:
    """SHA-256 of a model: its configuration, genes with their entropies, and every weight."""
    digest = hashlib.sha256(json.dumps(model.config.stored(), sort_keys=True).encode())
    digest.update(model.vocabulary.fingerprint.encode())
    digest.update(np.ascontiguousarray(model.vocabulary.entropy).tobytes())
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


# --- fitted objects ---------------------------------------------------------------------------------------------------
class Fitted:
    """Result of a fit to a user's cells: a model, settings and arrays, which can be saved to a folder.

    Attributes
    ----------
    kind
        Kind of the object, in the names of its files.
    model
        The model that was used for the fit.
    """

    kind: ClassVar[str]
    model: ScDiVa

    def _about(self) -> dict[str, object]:
        """Properties for the representation, by name; None is omitted."""
        raise NotImplementedError

    def __repr__(self) -> str:
        properties = {**self._about(), "model": self.model}
        lines = [printable(f"    {name}: {value!s:.200}") for name, value in properties.items() if value is not None]
        return "\n".join([type(self).__name__, *lines])

    def _repr_html_(self) -> str:
        return html_table(type(self).__name__, {**self._about(), "model": self.model})

    def _contents(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Settings, which :func:`plain` accepts, and arrays: everything except the model."""
        raise NotImplementedError

    @classmethod
    def _restored(cls, model: ScDiVa, settings: dict[str, Any], tensors: dict[str, Tensor]) -> Self:
        """Create an object from the contents of a folder.

        Raises
        ------
        KeyError, TypeError, AttributeError, ValueError
            If they do not fit together.
        """
        raise NotImplementedError

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write the object to a folder, atomically; :func:`scdiva.models.load` reads it.

        Parameters
        ----------
        path
            The folder to create.
        overwrite
            Whether to replace an existing folder of the same kind. Anything else is never replaced.

        Returns
        -------
        The folder.

        Raises
        ------
        FileExistsError
            If `path` exists and is not of this kind, contains files that scdiva did not write, or `overwrite` is False.
        ValueError
            If `path` is a URL.
        """
        folder = output_path(path, "path")
        settings, tensors = self._contents()
        head = {
            "format": f"scdiva {in_words(self.kind)}",
            "format_version": FORMAT_VERSION,
            "scdiva_version": __version__,
        }
        described, weights, _ = files = _files(self.kind)
        with written_beside(folder, overwrite, self.kind) as part:
            self.model.save(part / MODEL)
            text = json.dumps(head | plain(settings), indent=2, allow_nan=False)
            (part / described).write_text(text + "\n", encoding="utf-8")
            (part / weights).write_bytes(save({name: t.detach().cpu().contiguous() for name, t in tensors.items()}))
            write_sums(part, files)
        return folder


AnyFitted = TypeVar("AnyFitted", bound=Fitted)
_FITTED = {
    "annotator": "scdiva.annotation.annotator.Annotator",
    "perturbation_model": "scdiva.perturbation.model.PerturbationModel",
}
"""Classes of fitted objects by kind; they are in higher layers and are imported by name."""


def load_fitted(cls: type[AnyFitted], path: str | os.PathLike[str], device: str | None = None) -> AnyFitted:
    """Load an object that :meth:`Fitted.save` wrote.

    Parameters
    ----------
    cls
        Class of the object.
    path
        The folder.
    device
        Torch device of its model; None: `scdiva.settings.device`.

    Raises
    ------
    FileNotFoundError
        If a file is missing.
    ValueError
        If a file is damaged, was changed, or has another format.
    """
    folder = Path(path).expanduser()
    described, weights, _ = files = _files(cls.kind)
    sums = read_sums(folder, files, cls.kind)
    data = {name: read_checked(folder, name, sums) for name in files}
    settings = read_json(folder / described, data[described], f"scdiva {in_words(cls.kind)}")
    tensors = read_tensors(folder / weights, data[weights])
    model = load_model(folder / MODEL, device=device)
    try:
        return cls._restored(model, settings, tensors)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{folder} holds no {in_words(cls.kind)} that scdiva {__version__} reads: {error}") from error


@overload
def load(*, device: str | None = None) -> ScDiVa: ...
@overload
def load(model: Any, *, device: str | None = None) -> Any: ...
def load(model: str | os.PathLike[str] | ScDiVa | Fitted = DEFAULT_MODEL, *, device: str | None = None) -> Any:
    """Load a saved model, annotator or perturbation model.

    Parameters
    ----------
    model
        A folder, the name of a bundled model, or ``"hf://owner/name"``. Loaded objects are returned.
    device
        Torch device of the model. None: `settings.device`.

    Returns
    -------
    :class:`ScDiVa` (also of `tl.integrate` and `tl.adapt`), :class:`Annotator` or :class:`PerturbationModel`.

    Raises
    ------
    FileNotFoundError
        If the folder or one of its files does not exist.
    ValueError
        If a file is damaged, was changed, or has a newer format; the message names it.
    TypeError
        If `model` is of another type.

    Examples
    --------
    >>> import scdiva as sd
    >>> cells = sd.datasets.toy(120, 100)
    >>> reference, query = cells[:80].copy(), cells[80:].copy()
    >>> annotator = sd.tl.annotate(query, "cell_type", reference)
    >>> folder = annotator.save("blood")
    >>> sd.models.load("blood").labels
    ('type A', 'type B', 'type C', 'type D')
    """
    if isinstance(model, Fitted):
        return model
    if isinstance(model, str | os.PathLike) and (where := _FITTED.get(kind_of(Path(model).expanduser()) or "")):
        module, name = where.rsplit(".", 1)
        return load_fitted(getattr(import_module(module), name), model, device)
    return load_model(model, device=device)


def given_fitted(cls: type[AnyFitted], model: object, device: str | None) -> AnyFitted | None:
    """Return the argument `model` of a call if it is a fitted object or the folder of one, which is loaded; else None.

    Parameters
    ----------
    cls
        Class of the object.
    model
        The argument.
    device
        As for :func:`load_fitted`.
    """
    if isinstance(model, cls):
        return model
    if isinstance(model, str | os.PathLike) and kind_of(Path(model).expanduser()) == cls.kind:
        return load_fitted(cls, model, device)
    return None


def _files(kind: str) -> tuple[str, str, str]:
    return f"{kind}.json", f"{kind}.safetensors", f"{MODEL}/{CHECKSUMS}"


def check_shapes(tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ValueError if arrays have other names or shapes than expected; -1 stands for any length."""
    fits = tensors.keys() == expected.keys() and all(
        value.dim() == len(expected[name])
        and all(n in (m, -1) for m, n in zip(value.shape, expected[name], strict=True))
        for name, value in tensors.items()
    )
    if not fits:
        raise ValueError("it does not hold the tensors that its settings describe")


def plain(value: Any) -> Any:
    """Convert settings to JSON values; NaN becomes null."""
    if isinstance(value, dict):
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, np.ndarray):
        return [plain(part) for part in value.tolist()]
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not np.isfinite(value) else value


def arrays(value: Any) -> Any:
    """Convert JSON values back: null becomes NaN, lists become arrays."""
    if isinstance(value, dict):
        return {name: arrays(part) for name, part in value.items()}
    if isinstance(value, list):
        return np.array([np.nan if part is None else part for part in value])
    return np.nan if value is None else value
