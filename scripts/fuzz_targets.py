"""What scripts/fuzz.py runs, and the judge of it: parts of a model folder, read as `load_model` reads them.

A call is right if it ends in a model or in a ValueError or OSError that names the file. It is a finding if it ends in
anything else, takes too long or too much memory, or does what no reader of data does: compile or run code, start a
process, import, open a socket, write, or open a file outside the folder.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import io
import json
import os
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from scdiva.models import pretrained, save_model, storage
from scdiva.models.config import ScDiVaConfig
from scdiva.models.scdiva import ScDiVa
from scdiva.tokenizer.vocabulary import Vocabulary, load_vocabulary

MOST_SECONDS, MOST_MIB, LONGEST_MESSAGE = 10.0, 256, 2000
TINY = ScDiVaConfig(
    n_genes=12, dim=8, n_layers=1, n_heads=2, ffn_dim=8, max_length=8, anchor_linear_dim=2, anchor_learned_dim=2,
    anchor_hidden=4, anchor_residual=True, state_head=True, state_rank=2, tie_gene_head=True,
)  # fmt: skip
"""Every byte of a small file is reached sooner."""
KINDS = (storage.CONFIG, storage.WEIGHTS, storage.VOCABULARY, storage.CHECKSUMS, storage.CARD)
"""The file of a folder that the first byte of an input to the target `folder` stands for."""
SUSPECT = (
    "compile", "exec", "import", "marshal.", "pickle.", "code.", "ctypes.", "os.system", "os.exec", "os.posix_spawn",
    "os.spawn", "os.fork", "os.putenv", "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink",
    "os.truncate", "os.chmod", "os.chown", "pty.", "shutil.", "socket.", "subprocess.", "urllib.", "webbrowser.",
)  # fmt: skip
"""Beginnings of the names of audit events that reading data gives no reason for."""


class Finding(BaseException):  # no `except Exception` of what is tried may take it
    """What a loader must not do."""


class Outcome(NamedTuple):
    """How a call ended: `accepted`, and where and why it was refused if not."""

    accepted: bool
    where: str


class Watch:
    """Listens to Python's audit events while a loader runs. A hook stays for the life of the process."""

    def __init__(self) -> None:
        self.folder: str | None = None
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple) -> None:
        if self.folder is None:
            return
        if event.startswith(SUSPECT) or (event == "open" and not self._harmless(*arguments)):
            said = f"{event} {arguments!r:.200}"
            self.folder = None  # what follows, such as a traceback that reads source files, is ours
            raise Finding(f"done while loading: {said}")

    def _harmless(self, path: Any, mode: str | None, flags: int) -> bool:
        """Whether a file is opened for reading, in the folder."""
        if not isinstance(path, str | bytes):
            return True  # a descriptor: whatever it is, it was opened before
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        return not writes and os.path.realpath(os.fsdecode(path)).startswith(f"{self.folder}{os.sep}")

    @contextmanager
    def over(self, folder: Path) -> Iterator[None]:
        self.folder = os.path.realpath(folder)
        try:
            yield
        finally:
            self.folder = None


@functools.cache
def watch() -> Watch:
    """The one watch of this process."""
    return Watch()


class Place:
    """A folder with a tiny model, and what the targets need beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "model"
        vocabulary = load_vocabulary("human").subset(range(3, 3 + TINY.n_genes))
        model = ScDiVa(TINY, generator=torch.Generator().manual_seed(0))
        save_model(model, vocabulary, self.folder, metadata={"steps": 3, "corpus": ["a", "b"]})
        self.whole = {name: (self.folder / name).read_bytes() for name in KINDS}
        self.sums = storage.read_sums(self.folder)
        networks = functools.lru_cache(maxsize=64)(pretrained.without_memory)
        self.cached = lambda config: copy.deepcopy(networks(config))
        pretrained.load_model(self.folder, device="cpu")  # imports what loading imports, before anybody listens
        for again in self.whole[storage.VOCABULARY], b"PAR1":
            (self.folder / storage.VOCABULARY).write_bytes(again)
            with suppress(ValueError):
                vocabulary = Vocabulary.read(self.folder / storage.VOCABULARY)
                vocabulary.write(io.BytesIO())
                vocabulary.match(vocabulary.symbols)
        with suppress(ValueError):
            ScDiVaConfig.from_dict({"dmi": 3})
        self.put({})

    def put(self, files: dict[str, bytes]) -> dict[str, str]:
        """Write these files into the whole folder, with sums that agree; give the sums."""
        files = self.whole | files
        sums = {name: hashlib.sha256(files[name]).hexdigest() for name in storage.SUMMED}
        if files[storage.CHECKSUMS] is self.whole[storage.CHECKSUMS]:
            files[storage.CHECKSUMS] = "".join(f"{sums[name]}  {name}\n" for name in sums).encode()
        for name, data in files.items():
            (self.folder / name).write_bytes(data)
        return sums


def read_sums(place: Place, data: bytes) -> None:
    (place.folder / storage.CHECKSUMS).write_bytes(data)
    with watch().over(place.folder):
        sums = storage.read_sums(place.folder)
        storage.read_checked(place.folder, storage.CARD, sums)


def read_config(place: Place, data: bytes) -> None:
    """config.json to the network that it describes, which takes no memory; its layers are held to the weights first."""
    (place.folder / storage.CONFIG).write_bytes(data)
    sums = place.sums | {storage.CONFIG: hashlib.sha256(data).hexdigest()}
    with watch().over(place.folder):
        config = storage.read_config(place.folder, sums)
        described = pretrained._model_config(place.folder, config)
        pretrained._filled(described, place.whole[storage.WEIGHTS], place.folder / storage.WEIGHTS)


def read_weights(place: Place, data: bytes) -> None:
    """model.safetensors, filled into a network."""
    with watch().over(place.folder):
        model = pretrained._filled(TINY, data, place.folder / storage.WEIGHTS)
    _all_finite(model)


def read_vocabulary(place: Place, data: bytes) -> None:
    """vocabulary.safetensors, and all that is worked out from it later."""
    (place.folder / storage.VOCABULARY).write_bytes(data)
    with watch().over(place.folder):
        vocabulary = Vocabulary.read(place.folder / storage.VOCABULARY)
        vocabulary.match(vocabulary.symbols[:5])
    file = io.BytesIO()
    vocabulary.write(file)
    (place.folder / storage.VOCABULARY).write_bytes(file.getvalue())
    if Vocabulary.read(place.folder / storage.VOCABULARY) != vocabulary:
        raise Finding("an accepted vocabulary is another one once it was written and read")


def read_folder(place: Place, data: bytes) -> None:
    """A whole folder: one file is the input, and the rest agrees with it where it can."""
    name = KINDS[data[0] % len(KINDS)] if data else KINDS[0]
    files = {name: data[1:]}
    if name == storage.VOCABULARY:  # the fingerprint behind which a foreign vocabulary ends
        (place.folder / name).write_bytes(data[1:])
        try:
            vocabulary = Vocabulary.read(place.folder / name)
        except ValueError:
            pass
        else:
            said = {"n_genes": vocabulary.n_genes, "fingerprint": vocabulary.fingerprint}
            config = json.loads(place.whole[storage.CONFIG]) | {"vocabulary": said}
            files[storage.CONFIG] = json.dumps(config).encode()
    elif name == storage.CONFIG:
        files |= _weights_of(data[1:])
    place.put(files)
    try:
        with watch().over(place.folder):
            model = pretrained.load_model(place.folder, device="cpu")
        _all_finite(model)
        if model.training or model.config.n_genes != model.vocabulary.n_genes:
            raise Finding("the model is in training mode, or not of its vocabulary")
    finally:
        place.put({})


def _weights_of(config: bytes) -> dict[str, bytes]:
    """Weights that fit a config.json, if it describes a small network: so that what lies behind them is reached."""
    from safetensors.torch import save

    try:
        described = ScDiVaConfig.from_dict(json.loads(config)["model"])
        network = pretrained.without_memory(described) if described.n_layers < 4 else None
    except (ValueError, TypeError, KeyError, RecursionError, ArithmeticError, AttributeError):
        return {}
    if network is None or sum(tensor.numel() for tensor in network.state_dict().values()) > 100_000:
        return {}
    shapes = {name: tensor.shape for name, tensor in network.state_dict().items()}
    return {storage.WEIGHTS: save({name: torch.full(shape, 0.5) for name, shape in shapes.items()})}


def _all_finite(model: ScDiVa) -> None:
    if not all(bool(torch.isfinite(tensor).all()) for tensor in model.state_dict().values()):
        raise Finding("a model was loaded whose weights are not finite")


TARGETS: dict[str, Callable[[Place, bytes], None]] = {
    "sums": read_sums,
    "config": read_config,
    "weights": read_weights,
    "vocabulary": read_vocabulary,
    "folder": read_folder,
}


def judge(target: str, place: Place, data: bytes) -> Outcome:
    """Run one input; give how it ended, or raise Finding."""
    begun = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    whole, pretrained.without_memory = (
        pretrained.without_memory,
        place.cached,
    )  # the same small networks again and again
    try:
        TARGETS[target](place, data)
        outcome = Outcome(True, "")
    except (ValueError, OSError) as error:
        if len(str(error)) > LONGEST_MESSAGE:
            raise Finding(f"a message of {len(str(error)):,} characters: {error!s:.300}") from error
        if str(place.folder) not in str(error):
            raise Finding(f"{type(error).__name__} that names no file: {error!s:.300}") from error
        outcome = Outcome(False, _where(error))
    except Exception as error:
        raise Finding(f"{type(error).__name__}: {error!s:.300}") from error
    finally:
        pretrained.without_memory = whole
    if (seconds := time.perf_counter() - begun) > MOST_SECONDS:
        raise Finding(f"took {seconds:.1f} seconds")
    if (grown := (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) / 1024) > MOST_MIB:
        raise Finding(f"took {grown:.0f} MiB")
    return outcome


def _where(error: BaseException) -> str:
    """The place in our code where an input was refused, and what said so: alike for inputs that are refused alike."""
    trace, lines = error.__traceback__, []
    while trace is not None:
        if "scdiva" in (name := trace.tb_frame.f_code.co_filename):
            lines.append(f"{Path(name).stem}:{trace.tb_lineno}")
        trace = trace.tb_next
    if error.__cause__ is not None:
        lines.append(f"{type(error.__cause__).__name__} {re.sub(r'[^a-zA-Z ]', '', str(error.__cause__))[:45]}")
    return " ".join(lines)
