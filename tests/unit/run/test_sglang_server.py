"""verl's own SGLang server up to the start of its engine, with sglang replaced: the dtypes that reach ServerArgs."""

import json
import os
import subprocess
import sys

import pytest
from omegaconf import OmegaConf

from verl_precision.run.job import compose, parse_job

# sglang has no build for a CPU: any of its names is a stub, and ServerArgs records what the server is started with.
LAUNCH = """
import asyncio, importlib.abc, importlib.machinery, json, sys, types
from unittest.mock import MagicMock
from omegaconf import OmegaConf

class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "sglang":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        stubs = {}
        module.__getattr__ = lambda name: stubs.setdefault(name, MagicMock(name=name))
        module.__version__ = "0.5.12"
        return module
    def exec_module(self, module):
        pass

class ServerArgs:
    __dataclass_fields__ = {}
    def __init__(self, **args):
        self.args = args

class Started(Exception):
    pass

def start(server_args, **functions):
    raise Started(server_args.args)

sys.meta_path.insert(0, Finder())
import sglang.srt.entrypoints.http_server as http_server
http_server.ServerArgs, http_server.Engine._launch_subprocesses = ServerArgs, start
from verl.workers.rollout.replica import RolloutMode
from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer

def launch(config):
    node = OmegaConf.create(config)
    try:
        server = SGLangHttpServer(node.rollout, node.model, RolloutMode.HYBRID, [], 0, 0, 1, "0", 0)
        asyncio.run(server.launch_server())
    except Started as started:
        (args,) = started.args
        return [args["dtype"], args.get("kv_cache_dtype")]

json.dump([launch(config) for config in json.loads(sys.argv[1])], sys.__stderr__)
"""
ROLLOUT = "actor_rollout_ref.rollout"


@pytest.mark.slow
@pytest.mark.subprocess
def test_regime_reaches_the_server(tiny_model, tmp_path):
    def config(*words: str, args: str = "") -> dict:
        job = parse_job(["DEVICE=cpu", *words, f"MODEL={tiny_model}", f"ARGS={ROLLOUT}.name=sglang {args}"])
        node = compose(job, tmp_path).actor_rollout_ref
        return {name: OmegaConf.to_container(node[name], resolve=True) for name in ("rollout", "model")}

    cases = {
        "float16": [config("PRECISION=fp16"), config("PRECISION=bf16_train_fp16_infer")],
        "bfloat16": [config("PRECISION=bf16")],
        "float32": [config("PRECISION=fp32"), config("PRECISION=fp16", args=f"{ROLLOUT}.dtype=float32")],
    }
    cache = config("PRECISION=fp16", args=f"+{ROLLOUT}.engine_kwargs.sglang.kv_cache_dtype=fp8_e5m2")
    configs = json.dumps([*(each for several in cases.values() for each in several), cache])
    environment = os.environ | parse_job(["DEVICE=cpu"]).environment(tmp_path)
    done = subprocess.run([sys.executable, "-c", LAUNCH, configs], capture_output=True, text=True, env=environment)
    assert not done.returncode, done.stderr
    *launched, with_cache = json.loads(done.stderr[done.stderr.rindex("[[") :])
    assert launched == [[dtype, None] for dtype, several in cases.items() for _ in several]
    assert with_cache == ["float16", "fp8_e5m2"]
