"""How many processes train, when torchrun or srun has started them."""

from __future__ import annotations

import os
from collections.abc import Mapping


def launched(environment: Mapping[str, str] | None = None) -> tuple[int, int] | None:
    """Read from the environment what a launcher started.

    Parameters
    ----------
    environment
        None takes the process's.

    Returns
    -------
    Processes a node, and nodes: of torchrun, or else of srun; None if neither started this process.

    Raises
    ------
    ValueError
        If srun's tasks are not spread evenly over its nodes.
    """
    env = os.environ if environment is None else environment
    if "TORCHELASTIC_RUN_ID" in env:
        here = int(env["LOCAL_WORLD_SIZE"])
        return here, int(env["WORLD_SIZE"]) // here
    # as Lightning does: a job of these names is somebody at a prompt
    if "SLURM_NTASKS" in env and "SLURM_PROCID" in env and env.get("SLURM_JOB_NAME") not in ("bash", "interactive"):
        tasks, nodes = int(env["SLURM_NTASKS"]), int(env.get("SLURM_NNODES", "1"))
        if tasks % nodes:
            raise ValueError(
                f"srun started {tasks} tasks on {nodes} nodes: give each node as many (--ntasks-per-node)."
            )
        return tasks // nodes, nodes
    return None


def is_first_process() -> bool:
    """Whether this process is the first of a run, or its only one: the one that writes what is written once."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return os.environ["RANK"] == "0"
    return launched() is None or os.environ["SLURM_PROCID"] == "0"
