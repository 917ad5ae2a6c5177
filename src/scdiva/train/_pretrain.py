"""Pretraining from files to a saved model, in one call."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from scdiva._checks import check_arguments, from_extra, refuse_unknown, refuse_unwritable, warn
from scdiva._constants import N_SPECIAL
from scdiva._docs import with_shared_docs
from scdiva._files import MOST_INDEX, as_path, is_path, output_path, parse_json, parse_yaml, put_whole, read_bytes
from scdiva._rng import step_generator
from scdiva._settings import logger as messages
from scdiva._validate import Input
from scdiva.data.corpus import data_files, held_out_studies, study_names
from scdiva.data.genes import InputOptions, Species
from scdiva.data.packed import PackedCells, is_packed
from scdiva.data.soma import open_soma
from scdiva.models.config import ScDiVaConfig
from scdiva.models.storage import SCHEME, find_model, read_config, read_sums, save_model
from scdiva.tokenizer.names import read_species
from scdiva.tokenizer.serialize import score_denominator
from scdiva.tokenizer.vocabulary import Vocabulary, load_vocabulary
from scdiva.train.config import PretrainingConfig, check_logger

if TYPE_CHECKING:
    from scdiva.data.datamodule import CellDataModule
    from scdiva.models.scdiva import ScDiVa
    from scdiva.train.pretraining import PretrainingModule

MODEL = "model"
VOCABULARY = "vocabulary.safetensors"
CONFIG = "config.yaml"
MANIFEST = "manifest.json"


@check_arguments
@with_shared_docs
def pretrain(
    train: Sequence[str] | str | None,
    out: str,
    training: PretrainingConfig | None = None,
    *,
    soma: str | None = None,
    obs_filter: str | None = None,
    study_key: str | None = None,
    preset: str | None = None,
    model: ScDiVaConfig | Mapping[str, Any] | None = None,
    init: str | None = None,
    validation: Sequence[str] | str | None = None,
    validation_studies: float | Sequence[str] | None = None,
    vocabulary: str | None = None,
    layer: str | None = None,
    use_raw: bool = False,
    input: Input = "auto",
    gene_ids: str | None = None,
    species: Species = None,
    svd_start: bool = False,
    min_genes: int = 200,
    validation_cells: int | None = 2000,
    accelerator: str = "auto",
    devices: int = 1,
    num_nodes: int = 1,
    resume: bool = False,
    progress: bool = True,
    logger: Any = "csv",
) -> Path:
    """Pretrain a model on files and save it.

    Parameters
    ----------
    train
        ``.h5ad`` or ``.zarr`` files, one study each, folders of such files, and URLs of either; or one packed corpus.
        The files are read by row blocks. None: `soma` alone.
    out
        Folder of the run: at the start `config.yaml` (all options, including defaults), `manifest.json` (content of
        each file, and number of training and dropped cells of each study) and `vocabulary.safetensors` (with
        entropies); then `last.ckpt` and `log/`; at the end `model/`, which :func:`scdiva.models.load_model` reads.
    training
        Options of the training, a :class:`~scdiva.train.PretrainingConfig`. None: those of the preset, or the defaults.
    soma
        Address of a TileDB-SOMA experiment to train on (:func:`scdiva.data.open_soma`).
    obs_filter
        Filter of its `obs` that selects cells, such as `"tissue == 'lung'"`.
    study_key
        Column of its `obs` with the studies, such as `"dataset_id"`. None: the cells are one study.
    preset
        `"paper"`, `"base"`, `"base-lat"` or `"mini"`: defaults of model and training. Options, and fields in a file,
        take precedence (:meth:`ScDiVaConfig.preset <scdiva.models.ScDiVaConfig.preset>`,
        :meth:`PretrainingConfig.preset <scdiva.train.PretrainingConfig.preset>`).
    model
        A :class:`~scdiva.models.ScDiVaConfig`, or its fields that differ from the preset or the defaults; `n_genes`
        comes from the vocabulary.
    init
        Saved model with the initial weights: a folder, the name of a bundled model or ``"hf://owner/name"``. `model`
        and `preset` must agree with its architecture. The optimiser is not continued: the learning rate warms up again
        and decays until the end of `steps`. A query head keeps its weights and is not trained. Models of `tl.integrate`
        and `tl.adapt` are not supported. None: random weights.
    validation
        Files of validation studies.
    validation_studies
        Studies of `train` that are used for validation: names, or a share of the studies, drawn from the seed.
    vocabulary
        Name, model folder or file of a vocabulary. If it has no entropies, they are first computed from the training
        cells, as :func:`scdiva.pp.corpus_entropy` does. With `init`, genes that the model lacks are appended
        (:meth:`scdiva.tokenizer.Vocabulary.with_genes_of`) with random weights; the genes of the model keep tokens,
        entropies and weights. A packed corpus must be packed with that vocabulary. None: `"human"`, or with `init` the
        vocabulary of the model.
    %(layer)s
    %(use_raw)s
    %(input)s
    %(gene_ids)s
    species
        Species of the gene names: `"human"`, `"mouse"`, or a table (or its file) that maps genes to human genes, as in
        :func:`scdiva.tl.embed`. None: infer human or mouse for each file.
    svd_start
        Initialise gene embeddings, the linear part of a set encoder and the decoder of `anchor_objective="genes"` from
        an SVD of the corpus, which must be packed. Not with `init`.
    min_genes
        Minimum number of matched genes per cell; cells with fewer are dropped and counted.
    validation_cells
        Maximum number of validation cells, which are evenly spaced.
    accelerator
        Kind of device: `"auto"`, `"cpu"` or `"gpu"`.
    devices
        Number of devices per node. 1: the number that `torchrun` or `srun` started.
    num_nodes
        Number of nodes. 1: the number that `torchrun` or `srun` started.
    resume
        Whether to continue from `out/last.ckpt`. `init` must be that of the run; its model is not read again.
    progress
        Whether to show a progress bar.
    logger
        Where losses and scores are logged: `"csv"`, `"tensorboard"` or `"wandb"` (project `scdiva`), in `out`; or a
        logger of Lightning.

    Returns
    -------
    The model folder, the argument `model` of all functions in `scdiva.tl`.

    Raises
    ------
    FileExistsError
        If `out` is a file, holds a run and `resume` is False, or a finished model.
    FileNotFoundError
        If a file, the model `init`, or the checkpoint to resume is missing.
    ImportError
        If the package of the logger is not installed.
    ValueError
        If files, vocabulary and configuration do not fit together, or `init` has another architecture than `model` or
        `preset`.
    FloatingPointError, OSError, KeyboardInterrupt, SystemExit
        As in :func:`scdiva.train.fit`; `resume=True` continues from the last checkpoint.

    Examples
    --------
    >>> import scdiva as sd
    >>> from scdiva.train import PretrainingConfig, pretrain
    >>> sd.datasets.toy(60, 100).write_h5ad("study.h5ad")
    >>> small = {"dim": 16, "n_layers": 1, "n_heads": 2, "ffn_dim": 24}
    >>> training = PretrainingConfig(steps=2, batch_size=8, precision="fp32")
    >>> folder = pretrain(
    ...     "study.h5ad", "run", training, model=small, vocabulary="scdiva-mini", min_genes=1, progress=False
    ... )
    >>> sd.tl.embed(sd.datasets.toy(60, 100), folder)

    Continue the training from its weights:

    >>> longer = pretrain("study.h5ad", "run2", training, init=folder, min_genes=1, progress=False)
    """
    check_logger(logger)
    validation = None if validation is None else _paths(validation)
    if vocabulary is None and init is None:
        vocabulary = "human"
    vocabulary, out = None if vocabulary is None else os.path.expanduser(vocabulary), str(output_path(out))
    if init is not None and not str(init).startswith(SCHEME):
        init = os.path.expanduser(init)
    options = {name: value for name, value in locals().items() if name not in ("out", "training", "model", "resume")}
    options["train"] = files = [] if train is None else _paths(train)
    options["logger"] = logger if isinstance(logger, str) else type(logger).__name__
    # arguments are checked before packages are loaded, and before entropies take hours
    folder = Path(out)
    _refuse_folder(folder, resume)
    recorded = _recorded(folder, init) if resume else {}
    if soma is not None:
        cells = open_soma(soma, obs_filter=obs_filter)
        files = [*files, *([cells] if study_key is None else cells.by(study_key))]
    if not files:
        raise ValueError("train must name at least one file, or soma an experiment.")
    files = data_files(files)
    if svd_start:
        _check_svd_start(files, init, validation_studies)
    if training is None:
        training = PretrainingConfig() if preset is None else PretrainingConfig.preset(preset)
    config = _model_config(preset, model) if init is None else _init_config(init, preset, model, recorded)
    training.check_scored_genes(config.state_head)
    if training.context > config.max_length:
        raise ValueError(f"context={training.context} exceeds the model's max_length={config.max_length}.")
    if config.attention_backend == "triton":
        from_extra("triton", "gpu", "attention_backend='triton' needs Triton")
    training_files = _training_files(files, validation, validation_studies, training.seed)
    reading = InputOptions(layer, use_raw, input, gene_ids, read_species(species))

    from scdiva.data.datamodule import CellDataModule
    from scdiva.models.pretrained import fingerprint, load_model
    from scdiva.train.callbacks import CHECKPOINT_KEY, find_checkpoint, read_checkpoint
    from scdiva.train.runner import device_gib, fit, is_first_process, make_trainer

    checkpoint = find_checkpoint(folder) if resume else None
    saved = {} if checkpoint is None else read_checkpoint(checkpoint)
    hardware: dict[str, Any] = {"accelerator": accelerator, "devices": devices, "num_nodes": num_nodes}
    trainer = make_trainer(**hardware, logger=False, enable_checkpointing=False)  # checks the devices
    if saved and training.batch_size is None:
        training = replace(training, batch_size=saved[CHECKPOINT_KEY]["config"]["batch_size"])
    training = training.for_devices(trainer.world_size, device_gib(trainer), config)
    assert training.batch_size is not None
    if training.cells_per_step is not None:
        messages.info(
            "%d cells per step: %d per batch, %d batches per step on each of %d devices",
            *(training.cells_per_step, training.batch_size, training.accumulate, trainer.world_size),
        )
    start = None if init is None or resume else load_model(init, device="cpu")
    if start is None:
        n_old, origin = 0, recorded.get("init")
        genes = load_vocabulary(folder / VOCABULARY if vocabulary is None or resume else vocabulary)
    else:
        n_old, origin = start.config.n_genes, {"model": str(init), "fingerprint": fingerprint(start)}
        genes = start.vocabulary if vocabulary is None else start.vocabulary.with_genes_of(load_vocabulary(vocabulary))
        messages.info("starting from %s, with %d new genes", init, genes.n_genes - n_old)
    config = replace(config, n_genes=genes.n_genes)
    data = CellDataModule(
        files,
        validation=validation,
        validation_studies=validation_studies,
        vocabulary=genes,
        batch_size=training.batch_size,
        batch_tokens=training.batch_tokens,
        context=training.context,
        seed=training.seed,
        min_genes=min_genes,
        validation_cells=validation_cells,
        entropy_floor=config.entropy_floor,
        **reading.arguments(),
    )
    if saved:  # before the data are read
        data.load_state_dict(saved.get("CellDataModule", {}))
    with warnings.catch_warnings():
        if not is_first_process():  # all processes read the same files
            warnings.simplefilter("ignore", UserWarning)
        data.vocabulary = genes = _with_entropies(genes, training_files, min_genes, reading, n_old)
        data.setup()
    if species is not None and not isinstance(species, str):
        options["species"] = reading.species
    resolved = options | {"out": out, "model": config.to_dict(), "training": training.to_dict()}
    resolved = json.loads(json.dumps(resolved, default=str))  # files may be of type Path
    del resolved["model"]["n_genes"]  # comes from the vocabulary
    about = {} if origin is None else {"init": origin}
    _write_start(folder, resolved, data.manifest() | about, genes, resume)
    module = _module(config, training, data, files[0] if svd_start and not resume else None, start)
    try:
        trainer = fit(
            module, data, out_dir=folder, resume_from=checkpoint, progress=progress, logger=logger, **hardware
        )
    finally:
        data.close()
    metadata = {
        "steps": trainer.global_step,
        "config": resolved,
        "studies": data.study_names,
        "n_training_cells": data.n_cells,
        "corpus": data.manifest()["studies"],
        **about,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val/")},
    }
    if not trainer.is_global_zero:  # all processes have the same weights
        return folder / MODEL
    return save_model(module.model.cpu(), genes, folder / MODEL, metadata=metadata)


def _paths(files: Any) -> list[Any]:
    files = [files] if is_path(files) else files
    return [os.path.expanduser(file) if isinstance(file, str | os.PathLike) else file for file in files]


def _refuse_folder(folder: Path, resume: bool) -> None:
    """Raise an error if the folder can't be written, or if files would be overwritten."""
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is a file. Choose another out.")
    refuse_unwritable(folder / MODEL)
    if (folder / MODEL).exists():
        raise FileExistsError(f"{folder / MODEL} exists already: the run is finished. Choose another out.")
    if (folder / "last.ckpt").exists() and not resume:
        raise FileExistsError(f"{folder} holds a run that is not finished. Pass resume=True, or choose another out.")


def _check_svd_start(files: list[Any], init: str | None, validation_studies: float | Sequence[str] | None) -> None:
    """Raise an error unless `svd_start` is possible: with one packed corpus of training studies and without `init`."""
    if init is not None:
        raise ValueError("svd_start replaces the gene embeddings that init keeps. Pass one of the two.")
    if len(files) > 1 or not is_packed(files[0]):
        raise ValueError("svd_start needs one packed corpus as train: make it with scdiva.data.pack_files.")
    if validation_studies is not None:
        raise ValueError("svd_start would use the studies of validation_studies too: pack those into validation.")


def _model_config(preset: str | None, model: ScDiVaConfig | Mapping[str, Any] | None) -> ScDiVaConfig:
    if isinstance(model, ScDiVaConfig):
        return model
    if isinstance(model, str):
        raise TypeError(
            f"model={model!r} must be a ScDiVaConfig or its fields. To start from a saved model, pass init."
        )
    base = ScDiVaConfig() if preset is None else ScDiVaConfig.preset(preset)
    refuse_unknown(model or {}, [field.name for field in fields(base) if field.name != "n_genes"], "ScDiVaConfig")
    return replace(base, **(model or {}))


def _init_config(
    init: str, preset: str | None, model: ScDiVaConfig | Mapping[str, Any] | None, recorded: dict[str, Any]
) -> ScDiVaConfig:
    """Architecture of the model `init`, or of the records of a resumed run.

    ValueError if `preset` or `model` differ from it, or if the model was fitted to a dataset.
    """
    requested = _model_config(preset, model).to_dict()
    if preset is None and not isinstance(model, ScDiVaConfig):
        requested = dict(model or {})
    if recorded:
        config = ScDiVaConfig(**recorded["model"])
    else:
        folder = find_model(init)
        config = ScDiVaConfig.from_dict(read_config(folder, read_sums(folder))["model"])
    differing = [name for name, value in requested.items() if name != "n_genes" and getattr(config, name) != value]
    if differing:
        first = differing[0]
        raise ValueError(
            f"{len(differing)} fields of model or preset differ from those of init={init!r} (first: {first}="
            f"{requested[first]!r}, not {getattr(config, first)!r}). Leave both out: init sets the architecture."
        )
    if config.integrated or config.adapted:
        call = "tl.integrate" if config.integrated else "tl.adapt"
        raise ValueError(
            f"init={init!r} was made by {call}: what it fitted to a dataset would not fit the new weights. Pass the "
            f"model that {call} was given, and call it again with the pretrained one."
        )
    if config.query_head and not recorded:
        warn(
            f"The query head of init={init!r} is kept as it is and not trained: tl.impute uses it with the new "
            "weights. Train it again with scripts/train_mini.py."
        )
    return config


def _recorded(folder: Path, init: str | None) -> dict[str, Any]:
    """`model` and `init` from the records of a run; ValueError if it started from another model."""
    if not (folder / CONFIG).is_file() or not (folder / MANIFEST).is_file():
        return {}
    options = parse_yaml(folder / CONFIG, read_bytes(folder / CONFIG))
    manifest = parse_json(folder / MANIFEST, read_bytes(folder / MANIFEST, MOST_INDEX))
    if not isinstance(options, dict) or not isinstance(options.get("model"), dict) or not isinstance(manifest, dict):
        raise ValueError(f"{folder}: {CONFIG} or {MANIFEST} is damaged. Choose another out.")
    if options.get("init") != (None if init is None else str(init)):
        raise ValueError(
            f"{folder} holds a run that started with init={options.get('init')!r}, not {init!r}. Resume it with that, "
            "or choose another out."
        )
    return {"model": options["model"], "init": manifest.get("init")}


def _training_files(
    train: list[Any], validation: Sequence[Any] | None, validation_studies: float | Sequence[str] | None, seed: int
) -> list[Any]:
    """Files of the training studies; ValueError if one of them is also used for validation."""
    validation = data_files(validation or [])
    for file in map(as_path, [*train, *validation]):
        if isinstance(file, Path) and not file.exists():
            raise FileNotFoundError(f"no file {str(file)!r}.")
    packed = len(train) == 1 and is_packed(train[0])
    names = PackedCells(train[0]).study_names if packed else study_names([as_path(file) for file in train])
    overlap = [name for name in names if name in {as_path(file).stem for file in validation}]
    if overlap:
        raise ValueError(
            f"{len(overlap)} studies are in train and in validation (first: {overlap[0]!r}): cells of one study are "
            "too similar to validate on. Leave them out of one of the two."
        )
    held = held_out_studies(names, validation_studies, seed)
    return train if packed else [file for file, name in zip(train, names, strict=True) if name not in held]


def _with_entropies(
    genes: Vocabulary, train: list[Any], min_genes: int, reading: InputOptions, n_old: int
) -> Vocabulary:
    """Compute the entropies of a vocabulary that has none, or none for the genes after the first `n_old`."""
    entropy = genes.table["entropy"].to_numpy()
    new = np.arange(genes.n_genes) >= n_old
    if not new.any() or not np.isnan(entropy[new]).all() or any(is_packed(file) for file in train):
        return genes  # a packed corpus is already ranked by entropies; the vocabulary raises an error if it lacks them
    from scdiva.data.gene_entropy import corpus_entropy

    messages.info("counting the entropy of each gene over %d files", len(train))
    counted = corpus_entropy(train, genes, min_genes=min_genes, **reading.arguments())
    if not counted.n_cells:
        raise ValueError(f"no training cell has {min_genes} known genes or more.")
    return genes.with_entropy(np.where(new, counted.entropy()[N_SPECIAL:], entropy))


def _write_start(
    folder: Path, resolved: dict[str, Any], manifest: dict[str, Any], genes: Vocabulary, resume: bool
) -> None:
    """Write configuration, manifest and vocabulary of a run, in the first process."""
    from scdiva.train.runner import is_first_process

    folder.mkdir(parents=True, exist_ok=True)
    if not is_first_process():
        return
    if not resume:
        genes.write(folder / VOCABULARY)
    config = yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True)
    put_whole(folder / CONFIG, lambda file: file.write(config.encode()))
    put_whole(folder / MANIFEST, lambda file: file.write(json.dumps(manifest, indent=1).encode()))


def _module(
    config: ScDiVaConfig,
    training: PretrainingConfig,
    data: CellDataModule,
    svd_of: str | None,
    start: ScDiVa | None = None,
) -> PretrainingModule:
    """Module with a network whose weights are random, those of `start`, or initialised by the SVD of a packed corpus.

    Genes that `start` lacks get random weights.
    """
    import torch

    from scdiva.models import SetEncoder
    from scdiva.models.scdiva import ScDiVa, init_gene_embedding
    from scdiva.train.linear_map import fit_linear_map, set_linear_map
    from scdiva.train.pretraining import PretrainingModule

    network, frequency = ScDiVa(config, generator=step_generator(training.seed, 0, "weights")), None
    if start is not None:
        weights = start.state_dict()
        with torch.no_grad():
            for name, tensor in network.state_dict().items():  # its genes come first, new genes last
                tensor[: len(weights[name])] = weights[name].to(tensor)
    if svd_of is not None:
        width = config.anchor_linear_dim if isinstance(network.anchor, SetEncoder) else config.dim
        corpus = fit_linear_map(PackedCells(svd_of, data.vocabulary), width)
        vectors = corpus.weight[N_SPECIAL:, : config.dim]
        init_gene_embedding(network, vectors, generator=step_generator(training.seed, 0, "genes"))
        if isinstance(network.anchor, SetEncoder):
            set_linear_map(network.anchor, corpus)
        frequency = corpus.frequency
    denominator = score_denominator(data.vocabulary.entropy, config.entropy_floor)
    return PretrainingModule(network, training, data.n_studies, frequency, denominator)
