"""verl's FSDP engine under FSDP1 and FSDP2 on two gloo ranks.

Every fix is seen twice: the property holds on the patched tree, and its opposite on the pristine one.
"""

import math

import pytest

STRATEGIES = ("fsdp", "fsdp2")
both = pytest.mark.parametrize("strategy", STRATEGIES)


def outcome(cases, tree: str, strategy: str, name: str, ranks: int = 2) -> list[dict]:
    """The outcome of a case on each rank."""
    return [rank[name] for rank in cases(tree, strategy, ranks)]


@both
@pytest.mark.parametrize("role", ["", "_critic", "_ref"])
def test_dtype_alone_decides_every_hop(cases, strategy, role):
    half = {"linear": "float16", "linear.weight": "float16", "autocast": "float16", "master": "float32"}
    trained = {} if role == "_ref" else {"adam": "float32"}
    for rank in outcome(cases, "patched", strategy, "dtype_per_hop" + role):
        assert rank == half | trained | {"scaler": role != "_ref"}
    # Upstream: dtype=float16 composes, and trains in bf16.
    for rank in outcome(cases, "pristine", strategy, "dtype_per_hop" + role):
        assert rank["linear"] == rank["linear.weight"] == rank["autocast"] == "bfloat16" and not rank["scaler"]


@both
@pytest.mark.parametrize("case", ["overflow", "overflow_nan", "overflow_critic"])
def test_an_overflow_on_one_rank_skips_the_step_on_both(cases, strategy, case):
    for rank in outcome(cases, "patched", strategy, case):
        assert rank["unchanged"], "weights or Adam state moved"
        assert rank["gradients_cleared"] and rank["recovered"] and rank["scale_factor"] == 0.5


@both
@pytest.mark.parametrize("case", ["overflow", "overflow_nan", "overflow_critic"])
def test_a_skipped_step_is_reported_and_holds_the_learning_rate(cases, strategy, case):
    for rank in outcome(cases, "patched", strategy, case):
        metrics = rank["metrics"]
        assert (metrics["grad_norm"], metrics["skipped_steps"], metrics["loss_scale"]) == (None, 1.0, 512.0)
        assert rank["lr_held"]
    for rank in outcome(cases, "pristine", strategy, case):
        assert not math.isfinite(rank["metrics"]["grad_norm"]) and rank["metrics"]["skipped_steps"] is None
        assert not rank["lr_held"]


@both
def test_an_update_that_stepped_once_advances_the_learning_rate(cases, strategy):
    for rank in outcome(cases, "patched", strategy, "partly_skipped_update"):
        assert rank["lr_advanced"] and rank["skipped_steps"] == [1.0] and rank["loss_scale"] == [512.0]
        assert len(rank["grad_norm"]) == 1 and math.isfinite(rank["grad_norm"][0])
    for rank in outcome(cases, "pristine", strategy, "partly_skipped_update"):
        assert not all(map(math.isfinite, rank["grad_norm"]))


@both
def test_gradients_accumulate_in_fp32(cases, strategy):
    for rank in outcome(cases, "patched", strategy, "accumulation"):
        assert rank["synced"] == pytest.approx(rank["fp32"], rel=2e-3)
        assert rank["deferred"] == pytest.approx(rank["fp32"], rel=2e-3)
    for rank in outcome(cases, "pristine", strategy, "accumulation"):
        # FSDP1's no_sync accumulates in fp16; FSDP2's in fp32.
        assert math.isinf(rank["deferred"]) == (strategy == "fsdp")


@both
def test_a_checkpoint_restores_the_loss_scaler(cases, strategy):
    for rank in outcome(cases, "patched", strategy, "checkpoint"):
        assert rank["state"] and rank["next_step"]
        for saved, loaded in (rank["scale"], rank["tracker"], rank["lr"]):
            assert saved == loaded
        assert rank["scale"][0] == 16384.0 and rank["tracker"][0] == 1
        (warning,) = rank["old_checkpoint_warnings"]
        assert "holds no loss scale: starting at 65536" in warning
    for rank in outcome(cases, "pristine", strategy, "checkpoint"):
        assert rank["scale"] == [16384.0, 65536.0]


@both
@pytest.mark.parametrize("case", ["storm", "storm_nan"])
def test_a_storm_of_overflows_ends_the_run_and_names_where(cases, strategy, case):
    parameter = {"fsdp": "_flat_param", "fsdp2": "lm_head.weight"}[strategy]
    for rank in outcome(cases, "patched", strategy, case):
        assert rank["type"] == "LossScaleError"
        assert f"{parameter} in the shard of rank 1" in rank["error"]
        assert "4 optimizer steps in a row" in rank["error"] and "max_consecutive_skips" in rank["error"]
        assert rank["scales"] == [4.0, 2.0, 2.0], "fell below min_scale=2"
    for rank in outcome(cases, "pristine", strategy, case):
        assert rank["error"] is None and len(rank["scales"]) == 8


@both
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_other_regimes_train_as_upstream_does_to_the_bit(cases, strategy, dtype):
    patched = outcome(cases, "patched", strategy, f"trajectory_{dtype}")
    assert patched == outcome(cases, "pristine", strategy, f"trajectory_{dtype}")
    assert all(map(math.isfinite, patched[0]["norms"]))


@both
def test_one_pass_trains_as_upstreams_two(cases, strategy):
    patched = outcome(cases, "patched", strategy, "trajectory_fp16")
    pristine = outcome(cases, "pristine", strategy, "trajectory_fp16")
    assert patched[0]["norms"] == pytest.approx(pristine[0]["norms"], rel=1e-4)
    for one, two in zip(patched, pristine, strict=True):
        assert one["sum"] == pytest.approx(two["sum"], rel=1e-3)


@both
def test_fused_adamw_takes_the_scale_and_the_clip_coefficient(cases, strategy):
    foreach = outcome(cases, "patched", strategy, "trajectory_fp16")
    fused = outcome(cases, "patched", strategy, "trajectory_fp16_fused")
    assert fused[0]["norms"] == pytest.approx(foreach[0]["norms"], rel=1e-4)
    # torch's ShardedGradScaler hands fused optimizers a found_inf of a shape that they do not take.
    for rank in outcome(cases, "pristine", strategy, "trajectory_fp16_fused"):
        assert "broadcast shape" in rank["error"]


@both
def test_a_step_costs_one_all_reduce_and_one_read_of_the_device(cases, strategy):
    for rank in outcome(cases, "patched", strategy, "cost_of_a_step"):
        assert rank["fp16"] == rank["fp16_fused"] == {"all_reduces": 1, "host_reads": 1}
        assert rank["bf16"] == {"all_reduces": 1, "host_reads": 2}
    upstream = {"all_reduces": {"fsdp": 2, "fsdp2": 3}[strategy], "host_reads": 4}
    assert outcome(cases, "pristine", strategy, "cost_of_a_step")[0]["fp16"] == upstream


@both
def test_replicas_agree_on_the_norm_and_on_a_skip(cases, strategy):
    for rank in outcome(cases, "patched", strategy, "replicated", ranks=4):
        assert rank["replicated"] == pytest.approx(rank["sharded"], rel=1e-5)
        assert rank["unchanged"] and rank["skipped"] == 1.0


@both
def test_nothing_on_the_wire_is_bfloat16(cases, strategy):
    expected = {"full": ["float32"], "sender": "torch.float16", "receiver": "torch.float16"}
    upstream = {"full": ["float32"], "sender": "torch.bfloat16", "receiver": "torch.bfloat16"}
    if strategy == "fsdp2":
        expected |= {"delta": ["float16"], "merged_lora": ["float32"]}
        upstream |= {"delta": ["bfloat16"], "merged_lora": ["bfloat16"]}
    assert outcome(cases, "patched", strategy, "wire")[0] == expected
    assert outcome(cases, "pristine", strategy, "wire")[0] == upstream


@both
def test_a_checkpoint_records_the_training_dtype(cases, strategy):
    assert outcome(cases, "patched", strategy, "checkpoint")[0]["recorded_dtype"] == "float16"
    assert outcome(cases, "pristine", strategy, "checkpoint")[0]["recorded_dtype"] is None


@both
def test_the_scaler_works_on_the_workers_own_device(cases, strategy):
    for rank in outcome(cases, "patched", strategy, "scaler_device"):
        assert rank["enabled"] and rank["weights_finite"]
    # Upstream asks for "cuda": torch disables the scaler here, and one overflow is NaN weights.
    ranks = outcome(cases, "pristine", strategy, "scaler_device")
    assert not any(rank["enabled"] for rank in ranks) and not all(rank["weights_finite"] for rank in ranks)


def test_export_and_merger_keep_the_training_dtype(cases):
    lossless = {"export_lossless": True, "merged_lossless": True}
    assert outcome(cases, "patched", "fsdp2", "export")[0] == {"config": "float16", "merged": ["float16"]} | lossless
    lossy = {"export_lossless": False, "merged_lossless": False}
    assert outcome(cases, "pristine", "fsdp2", "export")[0] == {"config": "bfloat16", "merged": ["bfloat16"]} | lossy


def test_one_rank_where_fsdp1_shards_nothing(cases):
    (rank,) = outcome(cases, "patched", "fsdp", "accumulation", ranks=1)
    assert rank["deferred"] == pytest.approx(rank["fp32"], rel=2e-3)
    (patched,) = outcome(cases, "patched", "fsdp", "trajectory_bf16", ranks=1)
    (pristine,) = outcome(cases, "pristine", "fsdp", "trajectory_bf16", ranks=1)
    assert patched == pristine


FP32_INSIDE = ["float32", "float32", "float32"]  # weight, input, output
HALF = ["float16", "float16", "float16"]


@both
def test_modules_kept_in_fp32_neither_overflow_nor_change_the_others(cases, strategy):
    for rank in outcome(cases, "patched", strategy, "keep_fp32"):
        half, kept, full = rank["float16"], rank["kept"], rank["float32"]
        assert half["skipped"] == 1 and half["grad_norm"] is None, "the model was to overflow in fp16"
        assert kept["skipped"] == 0 and kept["grad_norm"] == pytest.approx(full["grad_norm"], rel=2e-3)
        assert kept["kept"] == ["model.layers.0.mlp", "lm_head"]
        assert kept["dtypes"]["model.layers.0.mlp.down_proj"] == FP32_INSIDE
        assert kept["dtypes"]["model.layers.0.mlp"] == ["float16", "float16"], "its surroundings stay in fp16"
        assert kept["dtypes"]["model.layers.1.mlp.down_proj"] == HALF
        assert kept["dtypes"]["lm_head"] == ["float32", "float16", "float32"]
        assert kept["exported"] == half["exported"] == full["exported"]
        assert max(rank["update_error"].values()) < 0.02, rank["update_error"]


@both
@pytest.mark.parametrize("role, head", [("critic", "score"), ("ref", "lm_head")])
def test_critic_and_ref_keep_modules_in_fp32_too(cases, strategy, role, head):
    for rank in outcome(cases, "patched", strategy, f"keep_fp32_{role}"):
        assert rank["dtypes"] == {
            head: ["float32", "float16", "float32"],
            "model.layers.1.self_attn.q_proj": ["float32", "float16", "float16"],
            "model.layers.1.self_attn.k_proj": HALF,
        }
        assert rank["follows"] == ["lm_head"] if role == "ref" else rank["grad_norm"] > 0


@both
def test_a_kept_module_keeps_its_lora_adapter(cases, strategy):
    for rank in outcome(cases, "patched", strategy, "keep_fp32_lora"):
        assert rank["dtypes"] == {
            "model.layers.0.mlp.down_proj.base_layer": FP32_INSIDE,
            "model.layers.1.mlp.down_proj.base_layer": HALF,
        }
        assert rank["grad_norm"] > 0 and rank["same_exports"]


@both
def test_a_checkpoint_of_kept_modules_comes_back(cases, strategy):
    for rank in outcome(cases, "patched", strategy, "keep_fp32_checkpoint"):
        assert rank == {"state": True, "next_step": True, "stepped": True}


@both
def test_a_storm_is_saved_as_the_last_good_state(cases, strategy):
    """With offloading, which the storm's error cuts through; tests/e2e/test_storm.py has the trainers."""
    for rank in outcome(cases, "patched", strategy, "storm_checkpoint"):
        assert rank["outcome"] == "LossScaleError" and rank["good"] and rank["lr_held"]
        # The scale that did not work is not taken up.
        assert rank["scale"] == 64.0 and math.isfinite(rank["next_step"])
        (warning,) = rank["warnings"]
        assert "holds no loss scale: starting at 64" in warning
    for rank in outcome(cases, "pristine", strategy, "storm_checkpoint"):
        assert rank["outcome"] is None and not rank["lr_held"]


@both
@pytest.mark.parametrize("loss", ["sft_loss", "ppo_loss", "value_loss"])
def test_an_all_masked_batch_is_a_loss_of_zero(cases, strategy, loss):
    for rank in outcome(cases, "patched", strategy, "masked_batches"):
        batch = rank[f"all {loss}"]
        assert batch == {"finite": True, "loss": 0.0, "grad_norm": 0.0, "skipped": 0.0, "scale": 1024.0}
    for rank in outcome(cases, "pristine", strategy, "masked_batches"):
        assert math.isnan(rank[f"all {loss}"]["loss"]) and not rank[f"all {loss}"]["finite"]


@both
@pytest.mark.parametrize("where", ["rank", "micro"])
def test_a_masked_part_of_a_batch_counts_for_nothing(cases, strategy, where):
    for tree in ("patched", "pristine"):
        for rank in outcome(cases, tree, strategy, "masked_batches"):
            batch = rank[f"{where} ppo_loss"]
            assert batch["finite"] and batch["loss"] != 0 and batch["grad_norm"] > 0 and not batch["skipped"]


@both
def test_a_learning_rate_of_zero_moves_nothing(cases, strategy):
    for rank in outcome(cases, "patched", strategy, "learning_rate_of_zero"):
        assert rank["weights_unchanged"] and rank["finite"] and rank["lr"] == [0.0, 0.0]
        assert all(norm > 0 for norm in rank["grad_norm"])


@pytest.mark.parametrize("trainer", ["legacy", "v1"])
@pytest.mark.parametrize("estimator", ["gae", "grpo"])
def test_a_reward_of_nan_ends_in_one_line(cases, trainer, estimator):
    """Not in a skipped step and a smaller loss scale."""
    patched = outcome(cases, "patched", "fsdp2", "nan_reward")[0][f"{trainer} {estimator}"]
    assert patched.startswith("1 of 4 rewards are not finite") and "\n" not in patched
    assert patched.endswith("row 2, data_source=sum, uid=b")
    # Upstream hands on NaN advantages: GAE's to every row, GRPO's to the whole group.
    assert outcome(cases, "pristine", "fsdp2", "nan_reward")[0][f"{trainer} {estimator}"] >= 2
