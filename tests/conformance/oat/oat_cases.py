"""The cases of one release of OAT: its own learner on two gloo ranks; imported by ``oat_runner`` in each rank.

Each case is a behaviour of ``oat_behaviours`` and returns a short text of facts, not a verdict: a pristine tree runs
the same cases, and its outcomes are compared with the predicted ones.
"""

import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from oat_learner import PATHS, RANK, TIS, digest, learned, made, state
from oat_loss_cases import (
    head_batch,
    head_bf16,
    head_fp16,
    mismatch,
    reference_bf16,
    reference_fp16,
    reinforce,
    weights_masked,
    weights_none,
    weights_reinforce,
    weights_sequence,
    weights_tis_c,
    weights_token,
)
from oat_scaler_cases import (
    checkpoint,
    dtype_bf16,
    dtype_bf16_train_fp16_infer,
    dtype_fp16,
    dtype_fp32,
    first_updates,
    gradient_norm,
    gradient_norm_zero_0,
    gradient_norm_zero_1,
    learning_rate,
    one_key,
    overflow_actor,
    overflow_critic,
    refusals,
    scaler_keys,
    scaler_metrics,
    storm,
)
from oat_wire_cases import (
    files,
    reports_zero_2,
    reports_zero_3,
    resumed,
    wire_bf16_train_fp16_infer,
    wire_fp16,
    wire_fp32,
)


def bf16() -> str:
    """Digest weights, masters, Adam state and losses of actor and critic after two updates without the fused head."""
    learner = made("--critic_type=ppo", "--no-use_fused_lm_head", "--beta=0.1")
    metrics = [learned(learner, seed) for seed in range(2)]
    kept = [torch.tensor([one[f"train/{key}"]]) for one in metrics for key in ("pg_loss", "critic_loss", "entropy")]
    mine = digest(*kept, *state(learner.model.model), *state(learner.critic))
    both = [None, None]
    dist.all_gather_object(both, mine)
    return " ".join(both)


CASES = [
    *(dtype_fp16, dtype_bf16, dtype_fp32, dtype_bf16_train_fp16_infer, one_key, refusals),
    *(first_updates, scaler_keys, overflow_actor, overflow_critic, learning_rate, scaler_metrics),
    *(gradient_norm, gradient_norm_zero_0, gradient_norm_zero_1, reference_bf16, reference_fp16),
    *(storm, checkpoint, mismatch, head_bf16, head_fp16, head_batch, reinforce),
    *(wire_fp16, wire_fp32, wire_bf16_train_fp16_infer),
    *(weights_none, weights_token, weights_sequence, weights_masked, weights_reinforce, files, resumed, bf16),
    reports_zero_2,
]
if TIS:
    CASES.append(weights_tis_c)
CASES.append(reports_zero_3)  # last, because transformers keeps ZeRO-3 enabled


def run(wanted: list[str], model: str, data: str, out: Path, connection: Connection) -> dict[str, str]:
    """Return the outcome of each case, or of the ``wanted`` ones; errors are outcomes too, since some are predicted."""
    vars(PATHS).update(model=model, data=data, out=out, connection=connection)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{out}/store", rank=RANK, world_size=2, timeout=timedelta(seconds=60)
    )
    return {case.__name__: attempt(case) for case in CASES if case.__name__ in wanted or not wanted}


def attempt(case: Callable[[], str]) -> str:
    start, cpu = time.monotonic(), time.process_time()
    try:
        outcome = case()
    except Exception as error:
        traceback.print_exc()
        outcome = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    print(
        f"CASE {case.__name__} {time.monotonic() - start:.1f} s, cpu {time.process_time() - cpu:.1f} s: {outcome}",
        flush=True,
    )
    return outcome
