"""Run cases of verl's real FSDP engine on gloo ranks, or on the rank of a GPU, against the verl tree on PYTHONPATH.

    engine_cases.py STRATEGY MODEL_DIR OUT_DIR CASE ...

Each case returns plain values, which rank r writes to OUT_DIR/rank_r.json; test_engine.py, test_flowrl_engine.py,
test_parallel.py and test_on_device.py assert on them. When a case ends the process, what the cases before it returned
is there. Except for keys of patched trees, the cases use APIs of upstream's 0.9.1, so that a pristine tree runs them
too.
"""

import json
import sys
from datetime import timedelta

import checkpoint_cases
import dtype_cases
import lora_cases
import moe_cases
import parallel_cases
import scaler_cases
import torch
import torch.distributed as dist
import wire_cases
from fsdp_worker import OUT, PATCHED, RANK
from support.waiting import STUCK_S

from verl.utils.device import get_device_name

MODULES = [checkpoint_cases, dtype_cases, lora_cases, moe_cases, parallel_cases, scaler_cases, wire_cases]
if PATCHED:
    import flowrl_cases

    MODULES.append(flowrl_cases)


def main() -> None:
    cases = {name: case for module in MODULES for name, case in module.CASES.items()}
    on_gpu = get_device_name() == "cuda"
    if on_gpu:  # the cases compare weights bitwise
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.cuda.set_device(RANK)
    # A rank that waits for another fails after this, not after half an hour.
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=STUCK_S))
    results = {}
    for name in sys.argv[4:]:  # an error in a case ends the run: another rank would wait in a collective
        results[name] = cases[name]()
        (OUT / f"rank_{RANK}.json").write_text(json.dumps(results, default=str).replace(str(OUT), "OUT"))


if __name__ == "__main__":
    main()
