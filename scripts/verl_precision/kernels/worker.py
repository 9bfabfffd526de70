"""Compile the kernels of a verl job for one generation: ``python -m verl_precision.kernels.worker sm75 DTYPE ...``.

Prints a JSON object a line: a kernel, or what could not be recorded. A separate process for each generation: verl
and vLLM choose some constants as they are imported.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict

import torch

from verl_precision.kernels import verl_cases, vllm_cases
from verl_precision.kernels.cases import Case, Missing
from verl_precision.kernels.compiled import compile_launch
from verl_precision.kernels.generations import GENERATIONS, Generation
from verl_precision.kernels.launches import Launch, recorded
from verl_precision.process import stdout_of_json


def record(case: Case, generation: Generation) -> list[Launch]:
    with recorded(generation) as launches:
        case.call()
    return launches


def kernels(generation: Generation, dtype: torch.dtype) -> Iterator[dict]:
    """Yield each kernel once, with the models that need it, in the order of the cases."""
    launches: dict[str, Launch] = {}
    needed: dict[str, tuple[str, list[str]]] = {}
    for module in (verl_cases, vllm_cases):
        for case in module.cases(dtype, generation):
            try:
                found = record(case, generation)
            except Missing as missing:
                yield {"group": case.group, "missing": str(missing)}
                continue
            for launch in found:
                launches.setdefault(launch.key, launch)
                models = needed.setdefault(launch.key, (case.group, []))[1]
                if case.model not in models:
                    models.append(case.model)
    yield {"kernels": len(launches)}
    for key, launch in launches.items():
        group, models = needed[key]
        yield {"group": group, "kernel": launch.kernel, "models": models} | asdict(compile_launch(launch, generation))


def main(name: str, *dtypes: str) -> None:
    lines = stdout_of_json()
    generation = GENERATIONS[name]
    vllm_cases.become(generation)
    for dtype in dtypes:
        for found in kernels(generation, getattr(torch, dtype)):
            print(json.dumps({"generation": name, "dtype": dtype} | found), file=lines)


if __name__ == "__main__":
    main(*sys.argv[1:])
