"""verl's FSDP engine under FSDP1 and FSDP2 on gloo ranks.

Every fix is tested twice: the property on the patched tree, and its opposite on the pristine one. Other roles and
releases are the conformance suite's, which also runs 0.9.1 under both strategies.
"""

import math

import pytest
from support.engine_rows import by_case


@by_case("dtype_per_hop", fsdp="quick")
def test_dtype_key_alone_sets_every_hop(patched, pristine):
    full = dict.fromkeys(("master", "buffer", "adam"), "float32")
    for rank in patched:
        assert rank == full | {"linear": ["float16"] * 3, "autocast": "float16", "scaler": True}
    for rank in pristine:  # accepts dtype=float16 and trains in bf16
        assert rank["linear"] == ["bfloat16"] * 3 and rank["autocast"] == "bfloat16" and not rank["scaler"]


UPSTREAMS = {
    "reports": 0,
    "metrics": {"grad_norm": "inf"},
    "lr": 1e-2 / 4,
    "weights": ["bfloat16"] * 2,
    "extra_state": ["lr_scheduler", "rng"],
    "dtype_recorded": None,
    "adapters": ["bfloat16"],
    "attention": "sdpa",  # for flash_attention_2, which the CPU's platform replaces
}
REQUESTED = UPSTREAMS | {
    "reports": 3,
    "metrics": {"skipped_steps": "1.0"},
    "lr": 0.0,
    "weights": ["float32", "bfloat16"],  # the class lists the first to keep
    "dtype_recorded": "bfloat16",
    "adapters": ["float32"],
    "attention": "eager",
}


@by_case("requests", fsdp="quick")
def test_hooks_act_where_a_precision_is_requested_alone(patched, pristine):
    for outcomes, upstream in zip(patched, pristine, strict=True):
        assert outcomes.pop("none") == upstream["none"] == UPSTREAMS
        assert outcomes.pop("report_dtypes=false") == REQUESTED | {"reports": 0}
        assert len(outcomes) == 3
        for name, outcome in outcomes.items():
            assert outcome == REQUESTED, name


FAULTS = {
    "inf in the first micro-batch",
    "NaN in the second micro-batch",
    "inf in the last micro-batch",
    "inf on every rank",
    "a loss of NaN",
}


@by_case("faults_actor", "faults_critic", "faults_actor_fused")
def test_overflow_skips_the_step_on_both_ranks(patched):
    """Every fault skips the step, bitwise, and is reported."""
    for rank in patched:
        assert set(rank) == FAULTS
        for number, (name, fault) in enumerate(rank.items(), start=1):
            assert fault["unchanged"], f"{name}: weights or Adam state moved"
            assert fault["gradients_cleared"] and fault["scale_factor"] == 0.5, name
            assert fault["moves_on"] and fault["next_step"], f"{name}: the next step is another"
            assert fault["lr_unchanged"], f"{name}: the learning rate moved on"
            skipped = {"grad_norm": None, "skipped_steps": 1.0, "loss_scale": 1024.0 / 2**number}
            assert fault["metrics"] == skipped, name


@by_case("faults_actor")
def test_upstream_trains_on_after_a_skip_and_reports_nothing(pristine):
    for rank in pristine:
        assert set(rank) == FAULTS
        for fault in rank.values():
            assert not fault["gradients_cleared"] and not fault["next_step"] and not fault["lr_unchanged"]
            assert not math.isfinite(fault["metrics"]["grad_norm"]) and not fault["metrics"]["skipped_steps"]


@by_case("scales_of_two_roles")
def test_checkpoint_contains_the_scale_of_its_own_role(patched):
    for rank in patched:
        assert rank == {"actor": 1024.0, "critic": 4096.0}


@by_case("accumulation", fsdp="quick")
def test_gradients_accumulate_in_fp32(patched, pristine, row):
    for rank in patched:
        assert rank["synced"] == pytest.approx(rank["fp32"], rel=2e-3)
        assert rank["deferred"] == pytest.approx(rank["fp32"], rel=2e-3)
    for rank in pristine:  # FSDP1's no_sync accumulates in fp16; FSDP2's in fp32
        assert math.isinf(rank["deferred"]) == (row.strategy == "fsdp")


@by_case("storm", fsdp="quick")
def test_storm_of_overflows_ends_the_run_and_names_the_gradient(patched, pristine, row):
    parameter = {"fsdp": "model.layers.1.mlp.gate_proj.weight", "fsdp2": "lm_head.weight"}[row.strategy]
    for rank in patched:
        assert rank["type"] == "LossScaleError"
        assert f"{parameter} in the shard of rank 1" in rank["error"]
        assert "4 optimizer steps in a row" in rank["error"] and "max_consecutive_skips" in rank["error"]
        assert rank["scales"] == [4.0, 2.0, 2.0], "fell below min_scale=2"
        assert rank["skips"] == [1.0, 1.0, 1.0], "a skip at the floor counts too"
    for rank in pristine:
        assert rank["error"] is None and len(rank["scales"]) == 8


@by_case("trajectory_fp32", live=True)
def test_fp32_matches_upstream_bit_for_bit(patched, pristine):
    """The conformance suite compares bf16."""
    assert patched == pristine and all(map(math.isfinite, patched[0]["norms"]))


@by_case("cost_of_a_step")
def test_step_takes_one_all_reduce_and_one_device_read(patched, pristine, row):
    for rank in patched:
        assert rank["fp16"] == rank["fp16_fused"] == {"all_reduces": 1, "host_reads": 1}
        assert rank["bf16"] == {"all_reduces": 1, "host_reads": 2}
    assert pristine[0]["fp16"] == {"all_reduces": {"fsdp": 2, "fsdp2": 3}[row.strategy], "host_reads": 4}


@by_case("replicated", ranks=4)
def test_replicas_agree_on_the_norm_and_on_a_skip(patched):
    for rank in patched:
        assert rank["replicated"] == pytest.approx(rank["sharded"], rel=1e-5)
        assert rank["unchanged"] and rank["skipped"] == 1.0


@by_case("wire")
def test_weight_sync_never_uses_bfloat16(patched, pristine, row):
    expected = {"full": ["float32"], "sender": "torch.float16", "receiver": "torch.float16"}
    upstream = {"full": ["float32"], "sender": "torch.bfloat16", "receiver": "torch.bfloat16"}
    if row.strategy == "fsdp2":
        expected |= {"delta": ["float16"], "merged_lora": ["float32"]}
        upstream |= {"delta": ["bfloat16"], "merged_lora": ["bfloat16"]}
        expected["lora"] = [["float16"], ["float32"]]
    assert patched[0] == expected and pristine[0] == upstream


@by_case("export", fsdp="never")
def test_export_and_merger_keep_the_training_dtype(patched, pristine):
    for ranks, dtype in ((patched, "float16"), (pristine, "bfloat16")):
        lossless = dtype == "float16"
        merged = {"dtypes": [dtype], "lossless": lossless}
        expected = {"config": dtype, "export_lossless": lossless, "merged": merged, "merged_of_one_worker": merged}
        assert ranks[0] == expected


FP32_INSIDE = ["float32", "float32", "float32"]  # weight, input, output
HALF = ["float16", "float16", "float16"]


@by_case("keep_fp32", fsdp="quick")
def test_modules_kept_in_fp32_neither_overflow_nor_change_the_others(patched, row):
    head = {"fsdp": "float16", "fsdp2": "float32"}[row.strategy]  # FSDP2 has resharded its weight by then
    for rank in patched:
        half, kept, full = rank["float16"], rank["kept"], rank["float32"]
        assert half["skipped"] == 1 and half["grad_norm"] is None, "the model must overflow in fp16"
        assert kept["skipped"] == 0 and kept["grad_norm"] == pytest.approx(full["grad_norm"], rel=2e-3)
        assert kept["kept"] == ["model.layers.*.mlp", "lm_head"]
        assert kept["dtypes"]["model.layers.0.mlp.down_proj"] == FP32_INSIDE
        assert kept["dtypes"]["model.layers.0.mlp"] == ["float16", "float16"], "what surrounds it must stay in fp16"
        assert kept["dtypes"]["model.layers.1.mlp.down_proj"] == HALF
        assert kept["dtypes"]["lm_head"] == [head, "float16", "float32"]
        assert kept["exported"] == half["exported"] == full["exported"]
        assert max(rank["update_error"].values()) < 0.02, rank["update_error"]


@by_case("attention_of_a_critic", fsdp="never")
def test_critic_has_the_configured_attention(patched, pristine):
    """Upstream takes flash_attention_2, for which the CPU's platform takes sdpa."""
    assert set(patched) == {"eager"} and set(pristine) == {"sdpa"}


@by_case("keep_fp32_critic")
def test_critic_keeps_its_head_in_fp32(patched):
    for rank in patched:
        assert rank["score"] == ["float32", "float16", "float32"] and rank["grad_norm"] > 0


@by_case("keep_fp32_lora", fsdp="quick")
def test_kept_module_keeps_its_lora_adapter(patched):
    for rank in patched:
        assert rank["dtypes"] == {
            "model.layers.0.mlp.down_proj.base_layer": FP32_INSIDE,
            "model.layers.1.mlp.down_proj.base_layer": HALF,
        }
        assert rank["grad_norm"] > 0 and rank["same_exports"]


@by_case("foreign_checkpoints")
def test_checkpoint_of_another_shape_is_refused_by_name(patched, pristine):
    for rank in patched:
        assert rank["scaler"]["type"] == "ValueError" and "hysteresis" in rank["scaler"]["message"]
        assert rank["extra"] in rank["scaler"]["message"]
        message = rank["world_size"]["message"]
        assert rank["world_size"]["type"] == "CheckpointError" and rank["directory"] in message
        assert "saved by 4 workers and this run has 2" in message and "n_gpus_per_node" in message
    for rank in pristine:
        assert rank["scaler"] is None
        assert rank["world_size"]["type"] == "FileNotFoundError" and "world_size_4" not in rank["world_size"]["message"]


def of_both(actor: int, critic: int) -> list[list[str]]:
    """Return the folders with weights after each of four saves if the last ``actor`` and ``critic`` are kept."""
    saves = []
    for last in range(1, 5):
        kept = [f"{step}/actor" for step in range(max(1, last - actor + 1), last + 1)]
        kept += [f"{step}/critic" for step in range(max(1, last - critic + 1), last + 1)]
        saves.append(sorted(kept))
    return saves


@by_case("kept_v1", "kept_legacy", fsdp="never")
def test_previous_checkpoint_is_removed_after_the_next_save(patched, pristine):
    """With async_save the trainer cannot know when the save has ended, and keeps one more."""
    expected = {"one": of_both(1, 1), "one and three": of_both(1, 3), "one, async": of_both(2, 2)}
    assert {name: kept["left"] for name, kept in patched[0].items()} == expected
    for name in ("one", "one and three"):
        assert patched[0][name]["safe"] and not pristine[0][name]["safe"]


@by_case("kept_sft", fsdp="never")
def test_sft_checkpoint_handler_removes_the_previous_one_after_the_next(patched, pristine):
    assert patched[0] == {"left": [["1"], ["2"], ["3"], ["4"]], "safe": True}
    assert not pristine[0]["safe"]


@by_case("sft_checkpoints", "ppo_checkpoints_v1", "ppo_checkpoints_legacy")
def test_trainer_resumes_from_a_whole_checkpoint_and_restores_the_data_order(patched, pristine, row):
    whole = {"resumed": 3, "data": True, "resumed_of_torn": 2, "state": True}
    # Upstream's data of the next epoch: none in SFT, the first epoch's again in the legacy trainer.
    upstream = {"resumed": 3, "data": row.case == "ppo_checkpoints_v1", "resumed_of_torn": 3, "state": False}
    if row.case != "sft_checkpoints":  # upstream starts from scratch if the newest is lost
        whole |= {"resumed_of_lost": "CheckpointError", "resumed_by_path": 1, "torn_by_path": "CheckpointError"}
        upstream |= {"resumed_of_lost": 0, "resumed_by_path": 1, "torn_by_path": 3}
    assert patched == [whole, whole] and pristine == [upstream, upstream]


@by_case("nan_reward_v1", fsdp="never", ranks=1)
def test_v1_trainer_refuses_a_nan_reward_and_names_its_data_source(patched, pristine):
    """Where a precision is requested, or by its key."""
    (outcomes,), (upstream,) = patched, pristine
    unrequested, checked, requested, off = outcomes.values()
    assert unrequested == off == upstream[""] == [True, True], "upstream trains on it"
    assert checked == requested and requested.startswith("1 of 2 rewards are not finite")
    assert ": row 1, data_source=product, uid=a; trainer.check_rewards=false" in requested


@by_case("masked_batches")
def test_all_masked_batch_has_zero_loss(patched, pristine):
    for loss in ("sft_loss", "ppo_loss", "value_loss"):
        for rank in patched:
            zero = {"finite": True, "loss": 0.0, "grad_norm": 0.0, "skipped": 0.0, "scale": 1024.0}
            assert rank[f"all {loss}"] == zero, loss
        for rank in pristine:
            assert math.isnan(rank[f"all {loss}"]["loss"]) and not rank[f"all {loss}"]["finite"], loss
    for where in ("rank", "micro"):  # a part of a batch is left out
        for rank in (*patched, *pristine):
            batch = rank[f"{where} ppo_loss"]
            assert batch["finite"] and batch["loss"] != 0 and batch["grad_norm"] > 0 and not batch["skipped"], where
