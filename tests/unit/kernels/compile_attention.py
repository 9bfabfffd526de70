"""Print what vLLM's unified attention becomes for a generation of GPUs: compile_attention.py GENERATION MODEL ..."""

import json
import sys
from dataclasses import asdict
from functools import partial

import torch
from triton.runtime import driver

from verl_precision.kernels import vllm_cases
from verl_precision.kernels.cases import MODELS, Case
from verl_precision.kernels.compiled import compile_launch
from verl_precision.kernels.generations import GENERATIONS
from verl_precision.kernels.worker import record


def main(name: str, *models: str) -> None:
    generation = GENERATIONS[name]
    vllm_cases.become(generation)
    for model in (model for model in MODELS if model.name in models):
        case = Case("", model.name, partial(vllm_cases.attention, model, torch.float16))
        launches = record(case, generation)
        compiled = compile_launch(launches[0], generation)
        names = [launch.kernel for launch in launches]
        print(json.dumps({"kernels": names, "fits": compiled.fits(generation), **asdict(compiled)}))
    assert driver._active is None, "Triton's driver was started"


if __name__ == "__main__":
    main(*sys.argv[1:])
