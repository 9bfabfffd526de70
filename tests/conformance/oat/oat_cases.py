"""The cases of one release of OAT: its own learner on two gloo ranks.

    oat_cases.py MODEL PROMPTS OUT [CASE ...]

Each case is a behaviour of ``oat_behaviours`` and returns a short text of facts, not a verdict: a pristine tree runs
the same cases, and its outcomes are compared with the predicted ones. Rank r writes them into OUT/rank_r.json.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from oat_learner import FP16, NO_TIS, PATHS, RANK, digest, fp16, learned, made, state
from oat_loss_cases import clamped_sequence, head, head_batch, masked, mismatch, objective, reference, sequence, token
from oat_rollout import start_rollout
from oat_scaler_cases import (
    checkpoint,
    dtypes,
    first_updates,
    learning_rate,
    norms,
    one_key,
    overflow,
    refusals,
    scaler_keys,
    scaler_metrics,
    storm,
)
from oat_wire_cases import files, reports, resumed, wire
from support.waiting import TIMEOUT_S


def bf16() -> str:
    """Digest weights, masters, Adam state and losses of actor and critic after two updates without the fused head."""
    learner = made("--critic_type=ppo", "--no-use_fused_lm_head", "--beta=0.1")
    metrics = [learned(learner, seed) for seed in range(2)]
    kept = [torch.tensor([one[f"train/{key}"]]) for one in metrics for key in ("pg_loss", "critic_loss", "entropy")]
    mine = digest(*kept, *state(learner.model.model), *state(learner.critic))
    both = [None, None]
    dist.all_gather_object(both, mine)
    return " ".join(both)


def unscaled(stage: int) -> str:
    return norms(partial(made, *FP16, "--initial_scale_power=10", "--hysteresis=1", f"--zero_stage={stage}"))


MIXED = "--precision=bf16_train_fp16_infer"
SEQUENCE = "--rollout_is=sequence"
TRUNCATED = (SEQUENCE, "--rollout_is_threshold=3", *NO_TIS)
UNBOUNDED = (SEQUENCE, "--rollout_is_threshold=inf")
MASKED = (*UNBOUNDED, "--rollout_rs=sequence", "--rollout_rs_threshold=3", *NO_TIS)
CASES = {
    "dtype_fp16": partial(dtypes, *FP16),
    "dtype_bf16": dtypes,
    "dtype_fp32": partial(dtypes, "--no-bf16"),
    "dtype_bf16_train_fp16_infer": partial(dtypes, MIXED),
    "one_key": one_key,
    "refusals": refusals,
    "first_updates": first_updates,
    "scaler_keys": scaler_keys,
    "overflow_actor": partial(overflow, "actor"),
    "overflow_critic": partial(overflow, "critic"),
    "learning_rate": learning_rate,
    "scaler_metrics": scaler_metrics,
    "gradient_norm": partial(norms, fp16),
    "gradient_norm_zero_0": partial(unscaled, 0),
    "gradient_norm_zero_1": partial(unscaled, 1),
    "reference_bf16": reference,
    "reference_fp16": partial(reference, *FP16),
    "storm": storm,
    "checkpoint": checkpoint,
    "mismatch": mismatch,
    "head_bf16": head,
    "head_fp16": partial(head, *FP16),
    "head_batch": head_batch,
    "wire_fp16": partial(wire, *FP16),
    "wire_fp32": partial(wire, "--no-bf16"),
    "wire_bf16_train_fp16_infer": partial(wire, MIXED),
    "reinforce": partial(objective, torch.ones_like, "--reinforce_update"),
    "weights_none": partial(objective, torch.ones_like, *NO_TIS),
    "weights_tis_c": partial(objective, partial(token, most=2.0)),
    "weights_token": partial(
        objective, partial(token, most=1.5), "--rollout_is=token", "--rollout_is_threshold=1.5", *NO_TIS
    ),
    "weights_sequence": partial(objective, partial(clamped_sequence, most=3.0), *TRUNCATED),
    "weights_masked": partial(objective, partial(masked, most=3.0), *MASKED),
    "weights_reinforce": partial(objective, sequence, "--reinforce_update", *UNBOUNDED),  # as in the paper
    "files": files,
    "resumed": resumed,
    "bf16": bf16,
    "reports_zero_2": partial(reports, "--critic_type=ppo"),
    "reports_zero_3": partial(reports, "--zero_stage=3"),  # last, because transformers keeps ZeRO-3 enabled
}


def attempt(name: str, case: Callable[[], str]) -> str:
    """Return the outcome of a case; errors are outcomes too, since some are predicted."""
    start = time.monotonic()
    try:
        outcome = case()
    except Exception as error:
        traceback.print_exc()
        outcome = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    print(f"CASE {name} {time.monotonic() - start:.1f} s: {outcome}", flush=True)
    return outcome


def main(model: str, prompts: str, out: str, *wanted: str) -> None:
    vars(PATHS).update(model=model, data=prompts, out=out)
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]  # the group of learner and actor has its own store
    if RANK == 0:
        PATHS.connection = start_rollout(Path(out))  # a fork, before this process has threads
    torch.set_num_threads(1)
    store = f"file://{out}/store"
    dist.init_process_group("gloo", store, timedelta(seconds=TIMEOUT_S), world_size=2, rank=RANK)
    outcomes = {name: attempt(name, case) for name, case in CASES.items() if name in wanted}
    Path(out, f"rank_{RANK}.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(*sys.argv[1:])
