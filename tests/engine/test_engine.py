"""verl's FSDP engine under FSDP1 and FSDP2 on two gloo ranks.

Every fix is tested twice: the property holds on the patched tree, and its opposite on the pristine one.
"""

import math

import pytest

STRATEGIES = ("fsdp", "fsdp2")
both = pytest.mark.parametrize("strategy", STRATEGIES)


def case(*names: str) -> pytest.MarkDecorator:
    """Parametrize a test by the cases of engine_cases.py that it reads, so that only these are run."""
    return pytest.mark.parametrize("case", names)


def outcome(cases, tree: str, strategy: str, name: str, ranks: int = 2) -> list[dict]:
    """Return the outcome of a case on each rank."""
    return [rank[name] for rank in cases(tree, strategy, ranks)]


@both
@case("dtype_per_hop", "dtype_per_hop_critic", "dtype_per_hop_ref")
def test_dtype_key_alone_sets_every_hop(cases, strategy, case):
    half = {"linear": "float16", "linear.weight": "float16", "autocast": "float16", "master": "float32"}
    half |= {"buffer": "float32"}
    trained = not case.endswith("ref")
    adam = {"adam": "float32"} if trained else {}
    for rank in outcome(cases, "patched", strategy, case):
        assert rank == half | adam | {"scaler": trained}
    # Upstream accepts dtype=float16 and trains in bf16.
    for rank in outcome(cases, "pristine", strategy, case):
        assert rank["linear"] == rank["linear.weight"] == rank["autocast"] == "bfloat16" and not rank["scaler"]


faults = case("faults_actor", "faults_critic")
SIX = {f"{value}, micro-batch {which}" for value in ("inf", "nan") for which in range(3)}


@both
@case("faults_actor", "faults_critic", "faults_actor_fused", "faults_critic_fused")
def test_an_overflow_in_one_micro_batch_of_one_rank_skips_the_step_on_both(cases, strategy, case):
    for rank in outcome(cases, "patched", strategy, case):
        assert set(rank) == SIX
        for where, fault in rank.items():
            assert fault["unchanged"], f"{where}: weights or Adam state moved"
            assert fault["gradients_cleared"] and fault["scale_factor"] == 0.5, where
            assert fault["moves_on"] and fault["next_step"], f"{where}: the next step is another"


@both
@faults
def test_upstream_keeps_the_gradients_of_a_skipped_step(cases, strategy, case):
    for rank in outcome(cases, "pristine", strategy, case):
        assert set(rank) == SIX
        assert not any(fault["gradients_cleared"] or fault["next_step"] for fault in rank.values())


@both
@faults
def test_skipped_step_is_reported_and_keeps_the_learning_rate(cases, strategy, case):
    for rank in outcome(cases, "patched", strategy, case):
        assert [fault["metrics"]["loss_scale"] for fault in rank.values()] == [512.0 / 2**skips for skips in range(6)]
        for fault in rank.values():
            assert (fault["metrics"]["grad_norm"], fault["metrics"]["skipped_steps"]) == (None, 1.0)
            assert fault["lr_unchanged"]
    for rank in outcome(cases, "pristine", strategy, case):
        assert not any(math.isfinite(fault["metrics"]["grad_norm"]) for fault in rank.values())
        assert not any(fault["metrics"]["skipped_steps"] or fault["lr_unchanged"] for fault in rank.values())


@both
@case("overflow_on_all_ranks_foreach", "overflow_on_all_ranks_fused")
def test_an_overflow_on_all_ranks_skips_the_step(cases, strategy, case):
    for rank in outcome(cases, "patched", strategy, case):
        assert rank == {"unchanged": True, "finite": True, "scale_factor": 0.5}


@both
@case("nan_loss")
def test_nan_loss_of_one_rank_skips_the_step_on_both(cases, strategy, case):
    for rank in outcome(cases, "patched", strategy, case):
        skipped = {"grad_norm": None, "skipped_steps": 1.0, "loss_scale": 512.0}
        assert rank == {"unchanged": True, "metrics": skipped}


@pytest.mark.parametrize("strategy", ["fsdp2"])
@case("torchs_sequence")
def test_torchs_own_sequence_skips_on_all_ranks(cases, strategy, case):
    for rank in outcome(cases, "patched", strategy, case):
        assert rank == [[False, False, 1024.0], [True, True, 512.0], [True, True, 256.0]]


@both
@case("scales_of_two_roles")
def test_checkpoint_contains_the_scale_of_its_own_role(cases, strategy, case):
    for rank in outcome(cases, "patched", strategy, case):
        assert rank == {"actor": 1024.0, "critic": 4096.0}


@both
@case("growth")
def test_the_scale_grows_after_the_configured_interval(cases, strategy, case):
    for rank in outcome(cases, "patched", strategy, case):
        assert rank == [1024.0, 2048.0, 2048.0, 1024.0, 1024.0, 2048.0, 2048.0]
    for rank in outcome(cases, "pristine", strategy, case):
        assert max(rank) == 1024.0, "upstream's interval is 400"


@both
@case("partly_skipped_update")
def test_an_update_that_stepped_once_advances_the_learning_rate(cases, strategy, case):
    for rank in outcome(cases, "patched", strategy, case):
        assert rank["lr_advanced"] and rank["skipped_steps"] == [1.0] and rank["loss_scale"] == [512.0]
        assert len(rank["grad_norm"]) == 1 and math.isfinite(rank["grad_norm"][0])
    for rank in outcome(cases, "pristine", strategy, case):
        assert not all(map(math.isfinite, rank["grad_norm"]))


@both
@case("accumulation")
def test_gradients_accumulate_in_fp32(cases, strategy, case):
    for rank in outcome(cases, "patched", strategy, case):
        assert rank["synced"] == pytest.approx(rank["fp32"], rel=2e-3)
        assert rank["deferred"] == pytest.approx(rank["fp32"], rel=2e-3)
    for rank in outcome(cases, "pristine", strategy, case):
        # FSDP1's no_sync accumulates in fp16; FSDP2's in fp32.
        assert math.isinf(rank["deferred"]) == (strategy == "fsdp")


@both
@case("checkpoint")
def test_a_checkpoint_restores_the_loss_scaler(cases, strategy, case):
    for rank in outcome(cases, "patched", strategy, case):
        assert rank["state"] and rank["next_step"]
        for saved, loaded in (rank["scale"], rank["tracker"], rank["lr"]):
            assert saved == loaded
        assert rank["scale"][0] == 16384.0 and rank["tracker"][0] == 1
        (warning,) = rank["old_checkpoint_warnings"]
        assert "holds no loss scale: starting at 65536" in warning
    for rank in outcome(cases, "pristine", strategy, case):
        assert rank["scale"] == [16384.0, 65536.0]


@both
@case("storm", "storm_nan")
def test_storm_of_overflows_ends_the_run_and_names_the_gradient(cases, strategy, case):
    parameter = {"fsdp": "model.layers.1.mlp.gate_proj.weight", "fsdp2": "lm_head.weight"}[strategy]
    for rank in outcome(cases, "patched", strategy, case):
        assert rank["type"] == "LossScaleError"
        assert f"{parameter} in the shard of rank 1" in rank["error"]
        assert "4 optimizer steps in a row" in rank["error"] and "max_consecutive_skips" in rank["error"]
        assert rank["scales"] == [4.0, 2.0, 2.0], "fell below min_scale=2"
        assert rank["skips"] == [1.0, 1.0, 1.0], "a skip at the floor counts too"
    for rank in outcome(cases, "pristine", strategy, case):
        assert rank["error"] is None and len(rank["scales"]) == 8


@both
@case("trajectory_bf16", "trajectory_fp32")
def test_other_regimes_match_upstream_bit_for_bit(cases, strategy, case):
    patched = outcome(cases, "patched", strategy, case)
    assert patched == outcome(cases, "pristine", strategy, case)
    assert all(map(math.isfinite, patched[0]["norms"]))


@both
@case("trajectory_fp16")
def test_fused_unscale_and_clip_matches_upstreams_two_passes(cases, strategy, case):
    patched = outcome(cases, "patched", strategy, case)
    pristine = outcome(cases, "pristine", strategy, case)
    assert patched[0]["norms"] == pytest.approx(pristine[0]["norms"], rel=1e-4)
    for one, two in zip(patched, pristine, strict=True):
        assert one["sum"] == pytest.approx(two["sum"], rel=1e-3)


@both
def test_fused_adamw_takes_the_scale_and_the_clip_coefficient(cases, strategy):
    foreach = outcome(cases, "patched", strategy, "trajectory_fp16")
    fused = outcome(cases, "patched", strategy, "trajectory_fp16_fused")
    assert fused[0]["norms"] == pytest.approx(foreach[0]["norms"], rel=1e-4)
    # torch's ShardedGradScaler passes fused optimizers a found_inf of a shape that they do not accept.
    for rank in outcome(cases, "pristine", strategy, "trajectory_fp16_fused"):
        assert "broadcast shape" in rank["error"]


@both
@case("cost_of_a_step")
def test_step_takes_one_all_reduce_and_one_device_read(cases, strategy, case):
    for rank in outcome(cases, "patched", strategy, case):
        assert rank["fp16"] == rank["fp16_fused"] == {"all_reduces": 1, "host_reads": 1}
        assert rank["bf16"] == {"all_reduces": 1, "host_reads": 2}
    upstream = {"all_reduces": {"fsdp": 2, "fsdp2": 3}[strategy], "host_reads": 4}
    assert outcome(cases, "pristine", strategy, case)[0]["fp16"] == upstream


@both
@case("replicated")
def test_replicas_agree_on_the_norm_and_on_a_skip(cases, strategy, case):
    for rank in outcome(cases, "patched", strategy, case, ranks=4):
        assert rank["replicated"] == pytest.approx(rank["sharded"], rel=1e-5)
        assert rank["unchanged"] and rank["skipped"] == 1.0


@both
@case("lora_adapter")
def test_lora_adapter_is_sent_whole_and_an_empty_one_is_refused(cases, strategy, case):
    for tree in ("patched", "pristine"):
        for rank in outcome(cases, tree, strategy, case):
            # Two blocks of seven Linears. peft 0.21 finds none of them under FSDP1.
            matrices = [name.rsplit(".", 2)[1] for name in rank["whole"]]
            assert sorted(matrices) == 14 * ["lora_A"] + 14 * ["lora_B"]
            if tree == "patched":
                assert "returned an empty adapter" in rank["empty"] and "install peft" in rank["empty"]
            else:
                assert rank["empty"] == [], "upstream sends it, and vLLM's worker dies"


@both
@case("wire")
def test_weight_sync_never_uses_bfloat16(cases, strategy, case):
    expected = {"full": ["float32"], "sender": "torch.float16", "receiver": "torch.float16"}
    upstream = {"full": ["float32"], "sender": "torch.bfloat16", "receiver": "torch.bfloat16"}
    if strategy == "fsdp2":
        expected |= {"delta": ["float16"], "merged_lora": ["float32"]}
        upstream |= {"delta": ["bfloat16"], "merged_lora": ["bfloat16"]}
    assert outcome(cases, "patched", strategy, case)[0] == expected
    assert outcome(cases, "pristine", strategy, case)[0] == upstream


@both
@case("checkpoint")
def test_a_checkpoint_records_the_training_dtype(cases, strategy, case):
    assert outcome(cases, "patched", strategy, case)[0]["recorded_dtype"] == "float16"
    assert outcome(cases, "pristine", strategy, case)[0]["recorded_dtype"] is None


@both
@case("scaler_device")
def test_the_scaler_works_on_the_workers_own_device(cases, strategy, case):
    for rank in outcome(cases, "patched", strategy, case):
        assert rank["enabled"] and rank["weights_finite"]
    # Upstream requests "cuda": torch disables the scaler on a CPU, and one overflow makes weights NaN.
    ranks = outcome(cases, "pristine", strategy, case)
    assert not any(rank["enabled"] for rank in ranks) and not all(rank["weights_finite"] for rank in ranks)


@case("export")
def test_export_and_merger_keep_the_training_dtype(cases, case):
    for tree, dtype in (("patched", "float16"), ("pristine", "bfloat16")):
        lossless = dtype == "float16"
        merged = {"dtypes": [dtype], "lossless": lossless}
        expected = {"config": dtype, "export_lossless": lossless, "merged": merged, "merged_of_one_worker": merged}
        assert outcome(cases, tree, "fsdp2", case)[0] == expected


@case("accumulation")
def test_gradients_accumulate_in_fp32_on_one_rank_where_fsdp1_shards_nothing(cases, case):
    (rank,) = outcome(cases, "patched", "fsdp", case, ranks=1)
    assert rank["deferred"] == pytest.approx(rank["fp32"], rel=2e-3)


@case("trajectory_bf16")
def test_bf16_matches_upstream_on_one_rank(cases, case):
    (patched,) = outcome(cases, "patched", "fsdp", case, ranks=1)
    (pristine,) = outcome(cases, "pristine", "fsdp", case, ranks=1)
    assert patched == pristine


FP32_INSIDE = ["float32", "float32", "float32"]  # weight, input, output
HALF = ["float16", "float16", "float16"]


@both
@case("keep_fp32")
def test_modules_kept_in_fp32_neither_overflow_nor_change_the_others(cases, strategy, case):
    for rank in outcome(cases, "patched", strategy, case):
        half, kept, full = rank["float16"], rank["kept"], rank["float32"]
        assert half["skipped"] == 1 and half["grad_norm"] is None, "the model must overflow in fp16"
        assert kept["skipped"] == 0 and kept["grad_norm"] == pytest.approx(full["grad_norm"], rel=2e-3)
        assert kept["kept"] == ["model.layers.0.mlp", "lm_head"]
        assert kept["dtypes"]["model.layers.0.mlp.down_proj"] == FP32_INSIDE
        assert kept["dtypes"]["model.layers.0.mlp"] == ["float16", "float16"], (
            "the surrounding module must stay in fp16"
        )
        assert kept["dtypes"]["model.layers.1.mlp.down_proj"] == HALF
        assert kept["dtypes"]["lm_head"] == ["float32", "float16", "float32"]
        assert kept["exported"] == half["exported"] == full["exported"]
        assert max(rank["update_error"].values()) < 0.02, rank["update_error"]


@both
@case("keep_fp32_critic", "keep_fp32_ref")
def test_critic_and_ref_keep_modules_in_fp32_too(cases, strategy, case):
    head = {"keep_fp32_critic": "score", "keep_fp32_ref": "lm_head"}[case]
    for rank in outcome(cases, "patched", strategy, case):
        assert rank["dtypes"] == {
            head: ["float32", "float16", "float32"],
            "model.layers.1.self_attn.q_proj": ["float32", "float16", "float16"],
            "model.layers.1.self_attn.k_proj": HALF,
        }
        assert rank["follows"] == ["lm_head"] if case == "keep_fp32_ref" else rank["grad_norm"] > 0


@both
@case("keep_fp32_lora")
def test_a_kept_module_keeps_its_lora_adapter(cases, strategy, case):
    for rank in outcome(cases, "patched", strategy, case):
        assert rank["dtypes"] == {
            "model.layers.0.mlp.down_proj.base_layer": FP32_INSIDE,
            "model.layers.1.mlp.down_proj.base_layer": HALF,
        }
        assert rank["grad_norm"] > 0 and rank["same_exports"]


@both
@case("keep_fp32_checkpoint")
def test_checkpoint_restores_kept_modules(cases, strategy, case):
    for rank in outcome(cases, "patched", strategy, case):
        assert rank == {"state": True, "next_step": True, "stepped": True}


@both
@pytest.mark.parametrize(
    ("case", "warning"),
    [("bf16_to_fp16", "holds no loss scale: starting at 1024"), ("fp16_to_bf16", "which this run does not use")],
)
def test_a_run_resumes_in_another_regime_with_a_warning(cases, strategy, case, warning):
    for number, rank in enumerate(outcome(cases, "patched", strategy, case)):
        (text,) = rank["warnings"]
        assert warning in text and f"extra_state_world_size_2_rank_{number}.pt" in text
        assert rank["state"] and rank["trains"]
    for rank in outcome(cases, "pristine", strategy, case):
        assert rank["warnings"] == []


@both
@case("foreign_checkpoints")
def test_a_checkpoint_of_another_shape_is_refused_by_name(cases, strategy, case):
    for rank in outcome(cases, "patched", strategy, case):
        assert rank["scaler"]["type"] == "ValueError" and "hysteresis" in rank["scaler"]["message"]
        assert rank["extra"] in rank["scaler"]["message"]
        message = rank["world_size"]["message"]
        assert rank["world_size"]["type"] == "CheckpointError" and rank["directory"] in message
        assert "saved by 4 workers and this run has 2" in message and "n_gpus_per_node" in message
    for rank in outcome(cases, "pristine", strategy, case):
        assert rank["scaler"] is None
        assert rank["world_size"]["type"] == "FileNotFoundError" and "world_size_4" not in rank["world_size"]["message"]


def kept(number: int | None, role: str = "") -> list[list[str]]:
    """Return the folders with weights after each of four saves if the last ``number`` are kept."""
    return [[f"{step}{role}" for step in range(1, last + 1)][-(number or last) :] for last in range(1, 5)]


def of_both(actor: int | None, critic: int | None) -> list[list[str]]:
    return [sorted(one + other) for one, other in zip(kept(actor, "/actor"), kept(critic, "/critic"), strict=True)]


@pytest.mark.parametrize("strategy", ["fsdp2"])
@case("kept_v1", "kept_legacy")
def test_previous_checkpoint_is_removed_after_the_next_save(cases, strategy, case):
    """With async_save the trainer cannot know when the save has ended, and keeps one more."""
    expected = {"all": of_both(None, None), "one": of_both(1, 1), "two": of_both(2, 2), "three": of_both(3, 3)}
    expected |= {"one and three": of_both(1, 3), "one, async": of_both(2, 2)}
    patched, _ = outcome(cases, "patched", strategy, case)
    assert {name: observed["left"] for name, observed in patched.items()} == expected
    del patched["one, async"]
    assert {name: observed["unsafe"] for name, observed in patched.items()} == dict.fromkeys(patched, [])
    pristine, _ = outcome(cases, "pristine", strategy, case)
    expected["one, async"] = of_both(1, 1)
    assert {name: observed["left"] for name, observed in pristine.items()} == expected
    assert "save_checkpoint" in pristine["one"]["unsafe"] and "save_checkpoint" not in pristine["two"]["unsafe"]


@pytest.mark.parametrize("strategy", ["fsdp2"])
@case("kept_sft")
def test_sft_checkpoint_handler_keeps_as_many(cases, strategy, case):
    expected = {"all": kept(None), "one": kept(1), "two": kept(2), "three": kept(3)}
    patched, _ = outcome(cases, "patched", strategy, case)
    assert {name: observed["left"] for name, observed in patched.items()} == expected
    assert {name: observed["unsafe"] for name, observed in patched.items()} == dict.fromkeys(patched, [])
    pristine, _ = outcome(cases, "pristine", strategy, case)
    assert {name: observed["left"] for name, observed in pristine.items()} == expected
    assert "save_checkpoint" in pristine["one"]["unsafe"] and "save_checkpoint" not in pristine["two"]["unsafe"]


# Upstream's data of the next epoch: none in SFT, the first epoch's again in the legacy trainer.
@both
@pytest.mark.parametrize(
    ("case", "theirs"), [("sft_checkpoints", False), ("ppo_checkpoints_v1", True), ("ppo_checkpoints_legacy", False)]
)
def test_trainer_resumes_from_a_whole_checkpoint_and_restores_the_data_order(cases, strategy, case, theirs):
    ppo = case != "sft_checkpoints"
    for rank in outcome(cases, "patched", strategy, case):
        lost = {"resumed_of_lost": "CheckpointError", "resumed_by_path": 1} if ppo else {}
        lost |= {"torn_by_path": "CheckpointError"} if ppo else {}
        assert rank == {"resumed": 3, "data": True, "resumed_of_torn": 2, "state": True} | lost
    for rank in outcome(cases, "pristine", strategy, case):  # upstream starts from scratch if the newest is lost
        lost = {"resumed_of_lost": 0, "resumed_by_path": 1, "torn_by_path": 3} if ppo else {}
        assert rank == {"resumed": 3, "data": theirs, "resumed_of_torn": 3, "state": False} | lost


@both
@case("storm_checkpoint")
def test_a_storm_is_saved_as_the_last_good_state(cases, strategy, case):
    """With offloading, which the storm's error interrupts; tests/e2e/test_resume.py tests the trainer."""
    for rank in outcome(cases, "patched", strategy, case):
        assert rank["outcome"] == "LossScaleError" and rank["good"] and rank["lr_unchanged"]
        # The scale of the storm is not restored.
        assert rank["scale"] == 64.0 and math.isfinite(rank["next_step"])
        (warning,) = rank["warnings"]
        assert "holds no loss scale: starting at 64" in warning
    for rank in outcome(cases, "pristine", strategy, case):
        assert rank["outcome"] is None and not rank["lr_unchanged"]


@both
@pytest.mark.parametrize("loss", ["sft_loss", "ppo_loss", "value_loss"])
@case("masked_batches")
def test_all_masked_batch_has_zero_loss(cases, strategy, loss, case):
    for rank in outcome(cases, "patched", strategy, case):
        batch = rank[f"all {loss}"]
        assert batch == {"finite": True, "loss": 0.0, "grad_norm": 0.0, "skipped": 0.0, "scale": 1024.0}
    for rank in outcome(cases, "pristine", strategy, case):
        assert math.isnan(rank[f"all {loss}"]["loss"]) and not rank[f"all {loss}"]["finite"]


@both
@pytest.mark.parametrize("where", ["rank", "micro"])
@case("masked_batches")
def test_masked_part_of_a_batch_is_ignored(cases, strategy, where, case):
    for tree in ("patched", "pristine"):
        for rank in outcome(cases, tree, strategy, case):
            batch = rank[f"{where} ppo_loss"]
            assert batch["finite"] and batch["loss"] != 0 and batch["grad_norm"] > 0 and not batch["skipped"]


@both
@case("learning_rate_of_zero")
def test_zero_learning_rate_leaves_weights_unchanged(cases, strategy, case):
    for rank in outcome(cases, "patched", strategy, case):
        assert rank["weights_unchanged"] and rank["finite"] and rank["lr"] == [0.0, 0.0]
        assert all(norm > 0 for norm in rank["grad_norm"])


@pytest.mark.parametrize("trainer", ["legacy", "v1"])
@pytest.mark.parametrize("estimator", ["gae", "grpo"])
@case("nan_reward")
def test_nan_reward_is_refused_in_one_line(cases, trainer, estimator, case):
    """The run must not continue with a skipped step and a smaller loss scale."""
    patched = outcome(cases, "patched", "fsdp2", case)[0][f"{trainer} {estimator}"]
    assert patched.startswith("1 of 4 rewards are not finite") and "\n" not in patched
    assert patched.endswith("row 2, data_source=sum, uid=b")
    # Upstream returns NaN advantages: in every row with GAE, in the whole group with GRPO.
    assert outcome(cases, "pristine", "fsdp2", case)[0][f"{trainer} {estimator}"] >= 2
