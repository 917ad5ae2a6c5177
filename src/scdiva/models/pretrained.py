"""Load a model from its folder, strictly and without pickle.

A model is a folder of plain files::

    config.json          format version, ScDiVaConfig, the vocabulary's fingerprint, the author's metadata
    model.safetensors    the weights, stored as float32, float16 or bfloat16
    vocabulary.safetensors   the genes (row i is token i + 3) with their names and their corpus entropy
    README.md            the model card
    SHA256SUMS           of the four files above, as `sha256sum -c` reads it

Nothing is repaired and nothing is filled in on loading: a file, a tensor or a gene that is missing, damaged, swapped or
left over is an error that names it. A model with one random layer gives embeddings that look like embeddings.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor
from torch.overrides import TorchFunctionMode

from scdiva._constants import DEFAULT_MODEL
from scdiva._files import printable
from scdiva._settings import logger, settings
from scdiva.models._folder import (
    CARD,
    CONFIG,
    DTYPES,
    SUMMED,
    VOCABULARY,
    WEIGHTS,
    read_checked,
    read_config,
    read_sums,
)
from scdiva.models.config import ScDiVaConfig
from scdiva.models.hub import find_model
from scdiva.models.scdiva import ScDiVa
from scdiva.tokenizer.vocabulary import Vocabulary


def load_model(model: str | os.PathLike[str] | ScDiVa = DEFAULT_MODEL, *, device: str | None = None) -> ScDiVa:
    """Load a model, ready to embed cells.

    Parameters
    ----------
    model
        The name of a bundled model (see `available`), a folder that `save_model` wrote, ``"hf://owner/name"`` (or
        ``"hf://owner/name@revision"``) on the Hugging Face Hub, or a loaded model, which is given back after a move to
        `device` if one is named.
    device
        A torch device; None takes `settings.device`.

    Returns
    -------
    ScDiVa
        In float32 and evaluation mode, with the attributes `config`, `vocabulary` (the `Vocabulary` it was trained
        with) and `metadata` (a dict). The state of torch's random generators is left as it was.

    Raises
    ------
    FileNotFoundError
        If there is no such model, its folder lacks a file, or the Hub can't be reached and its cache lacks the model.
    PermissionError, ConnectionError
        If the Hub refuses, or fails.
    ValueError
        If a file is damaged or was changed, the format is newer than this package, a tensor is missing, left over or of
        the wrong shape, or the vocabulary is not the one the model was trained with. The message names the file.
    TypeError
        If `model` is nothing of these, such as an annotator.
    ImportError
        If ``hf://`` is asked for and huggingface_hub is not installed.

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
    return _copied(_network(model)).to(target)


def load_for(model: str | os.PathLike[str] | ScDiVa, device: str) -> ScDiVa:
    """Load a model for a call that will run on a device and leaves the model as it was.

    A loaded one stays where it is. Named twice, a model on the CPU is the same network, not a copy.
    """
    if not isinstance(model, str | os.PathLike):
        return load_model(model)
    network = _network(model)
    return network if device == "cpu" else _copied(network).to(device)


_kept: dict[tuple[str, ...], tuple[ScDiVa, object]] = {}
"""The network last read, by its name and the checksums of its files, with its state then."""


def _network(name: str | os.PathLike[str]) -> ScDiVa:
    """Give the network of a folder on the CPU: the kept one, unless the files or the network have changed since."""
    folder = find_model(name)
    sums = read_sums(folder)
    config = read_config(folder, sums)
    data = {file: read_checked(folder, file, sums) for file in (WEIGHTS, CARD, VOCABULARY)}
    key = (os.fspath(name), *(sums[file] for file in SUMMED))
    network, state = _kept.get(key, (None, None))
    if network is None or _state(network) != state:
        with torch.inference_mode(False):  # else nobody could train it
            network = _read_network(folder, config, data)
        network.origin = f"{name}, saved by scdiva {config['scdiva_version']}"
        logger.info("loaded the model in %s", folder)
    _kept.clear()
    if settings.keep_model:
        _kept[key] = network, _state(network)
    return network


def _state(network: ScDiVa) -> object:
    """Give what differs once somebody has changed a network: its tensors, how often each was written to, and sums."""
    tensors = network.state_dict(keep_vars=True)
    written = [  # the sum for writes to x.data, which no version counts
        (name, x.data_ptr(), x._version, x.requires_grad, x.grad is None, float(x.detach().sum()))
        for name, x in tensors.items()
    ]
    return written, network.training, network.blocks.micro_batches, repr(network.metadata), network.config


def _copied(network: ScDiVa) -> ScDiVa:
    with torch.inference_mode(False):
        return copy.deepcopy(network, {id(network.vocabulary): network.vocabulary})


def _read_network(folder: Path, config: dict[str, Any], data: dict[str, bytes]) -> ScDiVa:
    """Make the network that a folder's files describe, from their contents."""
    vocabulary, expected = Vocabulary.read(folder / VOCABULARY, data[VOCABULARY]), config["vocabulary"]
    if {"n_genes": vocabulary.n_genes, "fingerprint": vocabulary.fingerprint} != expected:
        raise ValueError(
            f"{folder / VOCABULARY} is not the vocabulary that the model was trained with: it has {vocabulary.n_genes} "
            f"genes, fingerprint {vocabulary.fingerprint[:12]}, but {CONFIG} says {expected!s:.300}"
        )
    described = _model_config(folder, config)
    if described.n_genes != vocabulary.n_genes:
        raise ValueError(
            f"{folder}: {CONFIG} describes a model of {described.n_genes:,} genes, but {VOCABULARY} holds "
            f"{vocabulary.n_genes:,}"
        )
    network = _filled(described, data[WEIGHTS], folder / WEIGHTS)
    network.vocabulary, network.metadata = vocabulary, config["metadata"]
    return network.eval()


def _model_config(folder: Path, config: dict[str, Any]) -> ScDiVaConfig:
    """Give the configuration that config.json holds."""
    try:
        return ScDiVaConfig.from_dict(config["model"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder / CONFIG}: the entry 'model' is no ScDiVaConfig of this version: {error}") from error


def _filled(config: ScDiVaConfig, data: bytes, file: Path) -> ScDiVa:
    """Make a network of stored weights; no memory is taken before their names and shapes are those of the model."""
    stored = read_tensors(file, data, DTYPES)  # float64 may not fit into float32
    if config.n_layers > len(stored):
        raise ValueError(f"{file} lacks tensors: {CONFIG} describes {config.n_layers} layers, it holds {len(stored)}")
    try:
        network = without_memory(config)
    except ValueError as error:
        raise ValueError(f"{file.parent / CONFIG}: the entry 'model': {error}") from error
    expected = network.state_dict()
    for said, names in (("lacks", expected.keys() - stored.keys()), ("has in excess", stored.keys() - expected.keys())):
        if names:
            raise ValueError(
                f"{file} {said} {len(names)} tensors, by the model that {CONFIG} describes, first {min(names)!r:.80}"
            )
    for name, tensor in expected.items():
        value = stored[name]
        if value.shape != tensor.shape:
            raise ValueError(f"{file}: {name!r} has shape {tuple(value.shape)}, the model needs {tuple(tensor.shape)}")
        if value.is_floating_point() != tensor.is_floating_point():
            raise ValueError(f"{file}: {name!r} is stored as {value.dtype}, the model needs {tensor.dtype}")
        stored[name] = value.to(tensor.dtype, copy=True)  # the file's own memory can't be written to
    network.load_state_dict(stored, assign=True)
    return network


def read_tensors(file: Path, data: bytes, dtypes: Sequence[str] = (*DTYPES, "float64")) -> dict[str, Tensor]:
    """Read tensors of a file's contents, whose floating numbers are of one of these types and finite."""
    try:
        tensors = load(data)
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
    """Leaves out what fills tensors: on the meta device there is nothing to fill, and torch would load its compiler."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name.endswith("_") and not name.endswith("__") and name != "requires_grad_":
            return args[0] if args else next(iter(kwargs.values()))
        return func(*args, **(kwargs or {}))


def without_memory(config: ScDiVaConfig) -> ScDiVa:
    """Build a network on the meta device: names, shapes and types to hold a file against before memory is taken.

    Parameters
    ----------
    config
        Its sizes, however large; the time grows with `n_layers`.

    Raises
    ------
    ValueError
        If a size is larger than any tensor can be.
    """
    try:
        with torch.device("meta"), _Undrawn():
            return ScDiVa(config, generator=torch.Generator(device="cpu"))
    except (RuntimeError, OverflowError, TypeError, MemoryError) as error:
        said = next(iter(str(error).splitlines()), type(error).__name__)  # torch adds a trace of its own
        raise ValueError(f"no network has these sizes: {said:.200}") from error
