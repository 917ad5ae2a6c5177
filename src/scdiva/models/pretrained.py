"""Save a model to a folder and load it back, strictly and without pickle.

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
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scdiva._constants import DEFAULT_MODEL
from scdiva._settings import logger, settings
from scdiva._version import __version__
from scdiva.models._folder import (
    CARD,
    CONFIG,
    FORMAT,
    FORMAT_VERSION,
    SUMMED,
    VOCABULARY,
    WEIGHTS,
    is_model_folder,
    read_checked,
    read_config,
    read_sums,
    write_sums,
    written_beside,
)
from scdiva.models.hub import SCHEME, fetch

if TYPE_CHECKING:
    import torch

    from scdiva.models.config import ScDiVaConfig
    from scdiva.models.scdiva import ScDiVa
    from scdiva.tokenizer.vocabulary import Vocabulary

_BUNDLED = Path(__file__).parents[1] / "checkpoints"
_DTYPES = ("float32", "float16", "bfloat16")

CARD_VALUE = 300
"""Characters of the longest value that a model card written from the metadata repeats."""


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

    The folder is written beside `path` and renamed, so that it is there whole or not at all.

    Parameters
    ----------
    model
        The model; it is left as it is.
    vocabulary
        The genes it was built for, with their entropy: `model.config.n_genes` of them.
    path
        The folder to make. Its parents are made as needed.
    card
        Markdown for the model's README.md; None writes a short one from the configuration and `metadata`.
    metadata
        What else to keep in config.json, for instance the corpus and the steps trained. Plain JSON values.
    dtype
        How weights are stored: ``"float32"``, ``"float16"`` or ``"bfloat16"``. They are loaded as float32 in any case.
    overwrite
        Whether a model folder that stands at `path` is replaced. Anything else that stands there never is.

    Returns
    -------
    Path
        The folder.

    Raises
    ------
    FileExistsError
        If something stands at `path` already, and it is no model folder or `overwrite` is False.
    ValueError
        If the vocabulary is not the model's, weights are not finite (or not in `dtype`), or `metadata` is not JSON.

    Examples
    --------
    >>> import scdiva as sd
    >>> model = sd.models.load_model()
    >>> folder = sd.models.save_model(model, model.vocabulary, "my-model")
    >>> sd.models.load_model("my-model").config == model.config
    True
    """
    from safetensors.torch import save

    folder = Path(path).expanduser()
    if folder.exists() and not (overwrite and is_model_folder(folder)):
        hint = "pass overwrite=True" if is_model_folder(folder) else "it is no model folder; choose another path"
        raise FileExistsError(f"{folder} exists already: {hint}")
    if vocabulary.n_genes != model.config.n_genes:
        raise ValueError(
            f"the model was built for {model.config.n_genes:,} genes and the vocabulary holds {vocabulary.n_genes:,}: "
            "pass the vocabulary that it was trained with"
        )
    weights = {name: _stored(name, tensor, dtype) for name, tensor in model.state_dict().items()}
    config = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "scdiva_version": __version__,
        "model": model.config.stored(),
        "n_parameters": sum(parameter.numel() for parameter in model.parameters()),
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

    with written_beside(folder, overwrite) as part:
        (part / CONFIG).write_text(text, encoding="utf-8")
        (part / WEIGHTS).write_bytes(save(weights, metadata={"format": "pt"}))
        vocabulary.write(part / VOCABULARY)
        (part / CARD).write_text(_default_card(config) if card is None else card, encoding="utf-8")
        write_sums(part, SUMMED)
    return folder


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
    from scdiva.models.scdiva import ScDiVa

    if isinstance(model, ScDiVa):
        if getattr(model, "vocabulary", None) is None:
            raise ValueError(
                "this model has no vocabulary: set `model.vocabulary`, or save it with save_model and load that"
            )
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
    import torch

    folder = find_model(name)
    sums = read_sums(folder)
    config = read_config(folder, sums)
    data = {file: read_checked(folder, file, sums) for file in (WEIGHTS, CARD, VOCABULARY)}
    key = (os.fspath(name), *(sums[file] for file in SUMMED))
    network, state = _kept.get(key, (None, None))
    if network is None or _state(network) != state:
        with torch.inference_mode(False):  # else nobody could train it
            network = _read_network(folder, config, data)
        # Through object.__setattr__: not a parameter, and nn.Module types what its own __setattr__ takes.
        object.__setattr__(network, "origin", f"{name}, saved by scdiva {config['scdiva_version']}")
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
    return written, network.training, network.blocks.micro_batches, repr(vars(network).get("metadata")), network.config


def _copied(network: ScDiVa) -> ScDiVa:
    import torch

    with torch.inference_mode(False):
        return copy.deepcopy(network, {id(network.vocabulary): network.vocabulary})


def _read_network(folder: Path, config: dict[str, Any], data: dict[str, bytes]) -> ScDiVa:
    """Make the network that a folder's files describe, from their contents."""
    from scdiva.tokenizer.vocabulary import Vocabulary

    vocabulary = Vocabulary.read(folder / VOCABULARY, data[VOCABULARY])
    _check_vocabulary(folder, config, vocabulary)
    model_config = _model_config(folder, config)
    if model_config.n_genes != vocabulary.n_genes:
        raise ValueError(
            f"{folder}: {CONFIG} describes a model of {model_config.n_genes:,} genes, but {VOCABULARY} holds "
            f"{vocabulary.n_genes:,}"
        )
    network = _filled(model_config, data[WEIGHTS], folder / WEIGHTS)
    object.__setattr__(network, "vocabulary", vocabulary)
    object.__setattr__(network, "metadata", config["metadata"])
    return network.eval()


def bundled_models() -> list[str]:
    """List the models that come with the package.

    Returns
    -------
    list of str
        Names that `load_model` takes.
    """
    return sorted(path.parent.name for path in _BUNDLED.glob(f"*/{CONFIG}"))


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


def _stored(name: str, tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    """Copy a tensor to the CPU in the dtype it is stored in; refuse what that dtype can't hold."""
    import torch

    if dtype not in _DTYPES:
        raise ValueError(f"dtype={dtype!r}: weights are stored as one of {', '.join(_DTYPES)}")
    value = tensor.detach().cpu().contiguous()
    if not value.is_floating_point():
        return value.clone()
    if bad := int((~torch.isfinite(value)).sum()):
        raise ValueError(f"{bad:,} of {value.numel():,} values of {name!r} are NaN or infinite: the model is not saved")
    value = value.to(getattr(torch, dtype), copy=True)
    if bad := int((~torch.isfinite(value)).sum()):
        raise ValueError(f"{bad:,} values of {name!r} are too large for {dtype}: store them as bfloat16 or float32")
    return value


def _filled(config: ScDiVaConfig, blob: bytes, file: Path) -> ScDiVa:
    """Make a network of stored weights; no memory is taken before their names and shapes are those of the model."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load

    from scdiva.models._meta import without_memory

    try:
        stored = load(blob)
    except (SafetensorError, ValueError, KeyError) as error:
        raise ValueError(f"{file} is damaged or no safetensors file: {error!s:.300}") from error
    if config.n_layers > len(stored):
        raise ValueError(f"{file} lacks tensors: {CONFIG} describes {config.n_layers} layers, it holds {len(stored)}")
    try:
        network = without_memory(config)
    except ValueError as error:
        raise ValueError(f"{file.parent / CONFIG}: the entry 'model': {error}") from error
    expected = network.state_dict()
    if missing := sorted(expected.keys() - stored.keys()):
        raise ValueError(
            f"{file} lacks {len(missing)} tensors of the model that {CONFIG} describes, first {missing[0]!r:.80}"
        )
    if extra := sorted(stored.keys() - expected.keys()):
        raise ValueError(
            f"{file} holds {len(extra)} tensors that the model in {CONFIG} does not have, first {extra[0]!r:.80}"
        )
    kinds = {getattr(torch, dtype) for dtype in _DTYPES}  # float64 may not fit into float32, float8 has no arithmetic
    for name, tensor in expected.items():
        value = stored[name]
        if value.shape != tensor.shape:
            raise ValueError(f"{file}: {name!r} has shape {tuple(value.shape)}, the model needs {tuple(tensor.shape)}")
        if value.dtype not in kinds if tensor.is_floating_point() else value.dtype != tensor.dtype:
            raise ValueError(f"{file}: {name!r} is stored as {value.dtype}, the model needs {tensor.dtype}")
        if value.is_floating_point() and value.numel() and not torch.isfinite(torch.stack(value.aminmax())).all():
            raise ValueError(f"{file}: {name!r} holds NaN or infinite values")
        stored[name] = value.to(tensor.dtype, copy=True)  # the blob's own memory can't be written to
    network.load_state_dict(stored, assign=True)
    return network


def _model_config(folder: Path, config: dict[str, Any]) -> ScDiVaConfig:
    """Give the configuration that config.json holds."""
    from scdiva.models.config import ScDiVaConfig

    try:
        return ScDiVaConfig.from_dict(config["model"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder / CONFIG}: the entry 'model' is no ScDiVaConfig of this version: {error}") from error


def _check_vocabulary(folder: Path, config: dict[str, Any], vocabulary: Vocabulary) -> None:
    """Refuse a vocabulary that is not the one the model was trained with."""
    expected = config["vocabulary"]
    if {"n_genes": vocabulary.n_genes, "fingerprint": vocabulary.fingerprint} != expected:
        raise ValueError(
            f"{folder / VOCABULARY} is not the vocabulary that the model was trained with: it has {vocabulary.n_genes} "
            f"genes, fingerprint {vocabulary.fingerprint[:12]}, but {CONFIG} says {expected!s:.300}"
        )


def _default_card(config: dict[str, Any]) -> str:
    """Write a short model card from the configuration."""
    said = {**config["model"], **config["metadata"]}
    lines = [f"- {name}: {value if len(str(value)) <= CARD_VALUE else f'see {CONFIG}'}" for name, value in said.items()]
    return (
        "# An scdiva model\n\n"
        f"{config['n_parameters']:,} parameters, {config['vocabulary']['n_genes']:,} genes; written by scdiva "
        f"{config['scdiva_version']}.\n\n"
        "Load it with `scdiva.models.load_model(folder)`; embed cells with `scdiva.tl.embed(adata, model=folder)`.\n\n"
        "## Configuration\n\n" + "\n".join(lines) + "\n"
    )
