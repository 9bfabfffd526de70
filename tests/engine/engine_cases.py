"""Run cases of verl's real FSDP engine on gloo ranks, against the verl tree on PYTHONPATH.

    engine_cases.py STRATEGY MODEL_DIR OUT_DIR CASE ...

Each case returns plain values, which rank r writes to OUT_DIR/rank_r.json; test_engine.py and test_flowrl_engine.py
assert on them. Except for keys of patched trees, the cases use APIs of upstream's 0.9.1, so that a pristine tree runs
them too.
"""

import json
import sys
from datetime import timedelta

import checkpoint_cases
import dtype_cases
import scaler_cases
import torch.distributed as dist
import wire_cases
from fsdp_worker import OUT, PATCHED, RANK
from support.waiting import STUCK_S

MODULES = [checkpoint_cases, dtype_cases, scaler_cases, wire_cases]
if PATCHED:
    import flowrl_cases

    MODULES.append(flowrl_cases)


def main() -> None:
    cases = {name: case for module in MODULES for name, case in module.CASES.items()}
    # A rank that waits for another fails after this, not after half an hour.
    dist.init_process_group("gloo", timeout=timedelta(seconds=STUCK_S))
    # An error in a case ends the run: the other rank would wait in a collective.
    results = {name: cases[name]() for name in sys.argv[4:]}
    (OUT / f"rank_{RANK}.json").write_text(json.dumps(results, default=str).replace(str(OUT), "OUT"))


if __name__ == "__main__":
    main()
