"""The receiving end of the weight sync: a release's own ``WorkerWrap``, with a model that records what it loads.

Runs in a separate process, as vLLM's worker does, and answers ``oat_wire_cases.Actor`` over a connection.
"""

import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from oat.utils.distributed import WorkerWrap
from oat_learner import digest


class Model:
    """Record the dtype and a digest of each weight that it loads."""

    def __init__(self):
        self.digests: dict[str, str] = {}

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        self.digests.update({name: f"{tensor.dtype} {digest(tensor)}" for name, tensor in weights})


class Worker(WorkerWrap):
    """A worker with ``WorkerWrap`` mixed in, as in vLLM, whose model has ``dtype``."""

    def __init__(self, dtype: str):
        self.model_config = SimpleNamespace(dtype=getattr(torch, dtype))
        self.model_runner = SimpleNamespace(model=Model())


def start_rollout(out: Path) -> Connection:
    """Fork the process; return the connection to it, with which it ends."""
    ours, theirs = multiprocessing.Pipe()
    multiprocessing.get_context("fork").Process(target=serve, args=(theirs, ours, out)).start()
    theirs.close()
    return ours


def serve(connection: Connection, other_end: Connection, out: Path) -> None:
    """Call methods of ``WorkerWrap`` as requested until the connection closes."""
    other_end.close()
    dist.init_process_group("gloo", init_method=f"file://{out}/rollout-store", rank=0, world_size=1)
    worker = None
    while True:
        try:
            method, args, kwargs = connection.recv()
        except EOFError:
            return
        answer = None
        try:
            if method == "start":
                worker = Worker(*args)
            elif method == "received":
                answer = worker.model_runner.model.digests
            else:
                getattr(worker, method)(*args, **kwargs)
            connection.send((answer, None))
        except Exception as error:
            connection.send((None, f"{type(error).__name__}: {error}"))
            dist.destroy_process_group(worker._model_update_group)
            worker = None  # closes the connection, which the sender notices
