"""Run cases of verl's real FSDP engine on gloo ranks, against the verl tree on PYTHONPATH.

engine_cases.py STRATEGY MODEL_DIR OUT_DIR [CASE ...]

Without a name, all cases run. Each returns plain values, which rank r writes to OUT_DIR/rank_r.json; test_engine.py
asserts on them. The cases use only APIs of upstream's 0.9.1, so that a pristine tree runs them too.
"""

import json
import os
import sys
from datetime import timedelta

import batch_cases
import checkpoint_cases
import dtype_cases
import keep_fp32_cases
import scaler_cases
import torch.distributed as dist
import wire_cases
from fsdp_worker import OUT, PATCHED, RANK, STRATEGY

CASES = [
    dtype_cases.dtype_per_hop,
    dtype_cases.dtype_per_hop_critic,
    dtype_cases.dtype_per_hop_ref,
    scaler_cases.faults_actor,
    scaler_cases.faults_critic,
    scaler_cases.overflow_on_all_ranks_foreach,
    scaler_cases.growth,
    scaler_cases.partly_skipped_update,
    dtype_cases.accumulation,
    checkpoint_cases.checkpoint,
    scaler_cases.storm,
    scaler_cases.storm_nan,
    dtype_cases.trajectory_bf16,
    dtype_cases.trajectory_fp32,
    dtype_cases.trajectory_fp16,
    dtype_cases.trajectory_fp16_fused,
    scaler_cases.cost_of_a_step,
    wire_cases.wire,
    wire_cases.lora_adapter,
    scaler_cases.scaler_device,
    checkpoint_cases.bf16_to_fp16,
    checkpoint_cases.fp16_to_bf16,
    checkpoint_cases.foreign_checkpoints,
    checkpoint_cases.kept_v1,
    checkpoint_cases.kept_legacy,
    checkpoint_cases.kept_sft,
    checkpoint_cases.sft_checkpoints,
    checkpoint_cases.ppo_checkpoints_v1,
    checkpoint_cases.ppo_checkpoints_legacy,
    checkpoint_cases.storm_checkpoint,
    batch_cases.masked_batches,
    batch_cases.learning_rate_of_zero,
    batch_cases.nan_reward,
]
if PATCHED:  # upstream's first fused step raises, see dtype_cases.trajectory_fp16_fused
    CASES += [
        scaler_cases.faults_actor_fused,
        scaler_cases.faults_critic_fused,
        scaler_cases.overflow_on_all_ranks_fused,
        scaler_cases.nan_loss,
        scaler_cases.torchs_sequence,
        checkpoint_cases.scales_of_two_roles,
    ]
if STRATEGY == "fsdp2":
    CASES.append(wire_cases.export)
if PATCHED and os.environ["WORLD_SIZE"] == "2":
    CASES += [
        keep_fp32_cases.keep_fp32,
        keep_fp32_cases.keep_fp32_critic,
        keep_fp32_cases.keep_fp32_ref,
        keep_fp32_cases.keep_fp32_lora,
        keep_fp32_cases.keep_fp32_checkpoint,
    ]
if os.environ["WORLD_SIZE"] == "1":  # FSDP1 does not shard on one rank
    CASES = [dtype_cases.accumulation, dtype_cases.trajectory_bf16]
if os.environ["WORLD_SIZE"] == "4":
    CASES = [scaler_cases.replicated]


def main() -> None:
    # A rank that waits for a dead peer fails after 90 s, not after half an hour.
    dist.init_process_group("gloo", timeout=timedelta(seconds=90))
    # An error in a case ends the run: the other rank would wait in a collective.
    results = {case.__name__: case() for case in CASES if case.__name__ in sys.argv[4:] or not sys.argv[4:]}
    (OUT / f"rank_{RANK}.json").write_text(json.dumps(results, default=str))


if __name__ == "__main__":
    main()
