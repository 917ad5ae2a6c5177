"""The command line: `scdiva pretrain --config file.yaml`.

Every option of a run is a field of a dataclass or an argument of a function here, so the command line, the YAML file
and Python say the same things by the same names. Heavy packages are imported when work begins: `scdiva --help` answers
at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from scdiva.models.config import ScDiVaConfig
from scdiva.train.config import PretrainingConfig

MODEL = "model"
VOCABULARY = "vocabulary.parquet"
CONFIG = "config.yaml"


def pretrain(
    train: list[str],
    out: str,
    training: PretrainingConfig,
    *,
    model: dict[str, Any] | None = None,
    validation: list[str] | None = None,
    vocabulary: str = "human",
    layer: str | None = None,
    use_raw: bool = False,
    input: Literal["auto", "counts", "lognorm"] = "auto",
    gene_ids: str | None = None,
    svd_start: bool = False,
    min_genes: int = 1,
    validation_cells: int | None = 2000,
    num_workers: int = 0,
    accelerator: str = "auto",
    devices: int = 1,
    num_nodes: int = 1,
    resume: bool = False,
    progress: bool = True,
) -> Path:
    """Pretrain a model on files and save it.

    Parameters
    ----------
    train
        ``.h5ad`` or ``.zarr`` files, each a study of its own, folders of such files, or one packed corpus. Read by row
        blocks.
    out
        Folder of the run: `vocabulary.parquet` (with entropies), `last.ckpt`, `log/`, and at the end `model/`, which
        :func:`scdiva.models.load_model` reads.
    training
        See :class:`~scdiva.train.PretrainingConfig`.
    model
        Fields of :class:`~scdiva.models.ScDiVaConfig` that differ from its defaults; `n_genes` is the vocabulary's.
    validation
        Files of studies that are not trained on.
    vocabulary
        A name, a model folder or a parquet file. If it holds no entropies, they are counted from `train` first.
    layer, use_raw, input, gene_ids
        Where the expression is and what it is, as in :func:`scdiva.pp.match_genes` and the other calls.
    svd_start
        Start gene embeddings, the linear part of a set encoder and the decoder of `anchor_objective="genes"` from the
        SVD of the corpus, which must be packed.
    min_genes
        Cells with fewer known genes are left out.
    validation_cells
        At most so many cells are validated on, taken evenly.
    num_workers
        Processes that read ahead.
    accelerator, devices, num_nodes
        As for :func:`scdiva.train.fit`.
    resume
        Go on from `out/last.ckpt`.
    progress
        Whether to show a progress bar.

    Returns
    -------
    The model folder.

    Raises
    ------
    FileExistsError
        If `out` holds a run and `resume` is False, or a finished model.
    FileNotFoundError
        If there is nothing to resume.
    ValueError
        If files, vocabulary and configuration do not fit together.
    """
    folder = Path(out)
    if (folder / MODEL).exists():
        raise FileExistsError(f"{folder / MODEL} exists already: the run is finished. Choose another out.")
    if (folder / "last.ckpt").exists() and not resume:
        raise FileExistsError(f"{folder} holds a run that is not finished. Pass resume=true, or choose another out.")
    if not train:
        raise ValueError("train must name at least one file.")
    from scdiva.data.files import data_files

    train = [str(file) for file in data_files(train)]
    if svd_start and (len(train) > 1 or not Path(train[0]).is_file() or not _packed(train[0])):
        raise ValueError("svd_start needs one packed corpus as train: make it with scdiva.data.pack_files.")

    from scdiva._rng import step_generator
    from scdiva.data.datamodule import CellDataModule
    from scdiva.models.pretrained import save_model
    from scdiva.models.scdiva import ScDiVa
    from scdiva.tokenizer.serialize import score_denominator
    from scdiva.train.checkpoints import find_checkpoint
    from scdiva.train.launch import is_first_process
    from scdiva.train.pretraining import PretrainingModule
    from scdiva.train.runner import fit

    checkpoint = find_checkpoint(folder) if resume else None
    reading: dict[str, Any] = {"layer": layer, "use_raw": use_raw, "input": input, "gene_ids": gene_ids}
    genes = _vocabulary(folder / VOCABULARY if resume else vocabulary, train, reading)
    config = ScDiVaConfig(n_genes=genes.n_genes, **(model or {}))
    if training.context > config.max_length:
        raise ValueError(f"context={training.context} exceeds the model's max_length={config.max_length}.")
    data = CellDataModule(
        train,
        validation=validation,
        vocabulary=genes,
        batch_size=training.batch_size,
        batch_tokens=training.batch_tokens,
        context=training.context,
        seed=training.seed,
        min_genes=min_genes,
        validation_cells=validation_cells,
        num_workers=num_workers,
        entropy_floor=config.entropy_floor,
        **reading,
    )
    data.setup()
    folder.mkdir(parents=True, exist_ok=True)
    if not resume and is_first_process():
        genes.write(folder / VOCABULARY)
    network = ScDiVa(config, generator=step_generator(training.seed, 0, "weights"))
    frequency = _svd_start(network, train, genes, training.seed) if svd_start and not resume else None
    denominator = score_denominator(genes.entropy, config.entropy_floor)
    module = PretrainingModule(network, training, data.n_studies, frequency, denominator)
    trainer = fit(
        module,
        data,
        out_dir=folder,
        accelerator=accelerator,
        devices=devices,
        num_nodes=num_nodes,
        resume_from=checkpoint,
        progress=progress,
    )
    metadata = {
        "steps": trainer.global_step,
        "training": training.to_dict(),
        "studies": data.study_names,
        "n_training_cells": data.n_cells,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val/")},
    }
    data.close()
    if not trainer.is_global_zero:  # all processes hold the same weights
        return folder / MODEL
    return save_model(network.cpu(), genes, folder / MODEL, metadata=metadata)


def _packed(file: str) -> bool:
    from scdiva.data.packed import is_packed

    return is_packed(file)


def _svd_start(network: Any, train: list[str], genes: Any, seed: int) -> Any:
    """Start a network's gene vectors and its set encoder's linear part from the corpus; return the gene frequencies."""
    from scdiva._constants import N_SPECIAL
    from scdiva._rng import step_generator
    from scdiva.data.packed import PackedCells
    from scdiva.models.gene_vectors import init_gene_embedding
    from scdiva.train.anchor import set_linear_map
    from scdiva.train.linear_map import fit_linear_map

    config = network.config
    with_encoder = config.anchor == "encoder"
    corpus = fit_linear_map(PackedCells(train[0], genes), config.anchor_linear_dim if with_encoder else config.dim)
    vectors = corpus.weight[N_SPECIAL:, : config.dim]
    init_gene_embedding(network, vectors, generator=step_generator(seed, 0, "genes"))
    if with_encoder:
        set_linear_map(network.anchor, corpus)
    return corpus.frequency


def _vocabulary(vocabulary: str | Path, train: list[str], reading: dict[str, Any]) -> Any:
    """Load a vocabulary; where it has no entropies, count them."""
    from scdiva._settings import logger
    from scdiva.tokenizer.vocabulary import load_vocabulary

    genes = load_vocabulary(vocabulary)
    if genes.table["entropy"].notna().any() or any(_packed(file) for file in train):
        return genes  # a packed corpus was ranked by entropies already; without them the vocabulary itself complains
    from scdiva._constants import N_SPECIAL
    from scdiva.pp import corpus_entropy

    logger.info("counting the entropy of each gene over %d files", len(train))
    entropy = corpus_entropy(train, genes, **reading).entropy()
    return genes.with_entropy(entropy[N_SPECIAL:])


def _parsers() -> tuple[Any, Any]:
    """Command-line parsers of the program and of `pretrain`, read off the signatures."""
    from jsonargparse import ActionConfigFile, ArgumentParser

    parser = ArgumentParser(prog="scdiva", description="Single-cell embeddings from masked discrete diffusion.")
    pretraining = ArgumentParser(prog="scdiva pretrain", description="Pretrain a model on h5ad files and save it.")
    pretraining.add_argument("--config", action=ActionConfigFile, help="YAML file with any of the options below.")
    pretraining.add_function_arguments(pretrain, skip={"model", "training"}, as_group=True)
    pretraining.add_class_arguments(PretrainingConfig, "training", instantiate=False)
    # the number of genes is the vocabulary's, hence no option
    pretraining.add_class_arguments(ScDiVaConfig, "model", skip={"n_genes"}, instantiate=False)
    commands = parser.add_subcommands(dest="command", required=True)
    commands.add_subcommand("pretrain", pretraining, help=pretraining.description)
    return parser, pretraining


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    argv
        Arguments without the program's name; None reads the process's.

    Returns
    -------
    0, or 1 after an error in what was asked (said in one line), or 130 after Ctrl-C.
    """
    parser, pretraining = _parsers()
    options = parser.parse_args(None if argv is None else list(argv)).pretrain
    arguments = options.as_dict()
    arguments.pop("config", None)
    try:
        training = PretrainingConfig(**arguments.pop("training"))
        folder = pretrain(training=training, **arguments)
    except (ValueError, KeyError, OSError, FloatingPointError) as error:
        sys.stderr.write(f"scdiva pretrain: {error.args[0] if isinstance(error, KeyError) else error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write(
            f"scdiva pretrain: stopped. Go on with the same options and --resume true (out: {options.out})\n"
        )
        return 130
    from scdiva.train.launch import is_first_process

    if is_first_process():
        pretraining.save(options, Path(options.out) / CONFIG, overwrite=True)
        sys.stdout.write(f"{folder}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
