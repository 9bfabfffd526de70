"""LoRA over a frozen base in 16 bits, with verl's engine on gloo ranks."""

import torch
from lora_merge import merge_in_fp32
from support.engine_rows import by_case


@by_case("lora_dtypes", fsdp="quick")
def test_adapters_are_fp32_masters_over_a_frozen_base_in_16_bits(patched, pristine):
    """Each computes what it would over a base in fp32, which FSDP rounds alike, bitwise."""
    full = dict.fromkeys(("adapters", "adam", "gradients"), ["float32"])
    for rank in patched:
        for dtype in ("float16", "bfloat16"):
            result = rank[dtype]
            assert result["dtypes"] == full | {"base": [dtype]}
            assert result["as_over_fp32"], (result["norms"], result["norms_over_fp32"])
            assert result["base_kept"] and result["moved"]
    for rank in pristine:
        assert set(map(str, rank["bfloat16"]["dtypes"].values())) == {"['bfloat16']"}
        assert not rank["bfloat16"]["as_over_fp32"]


@by_case("lora_merge", fsdp="quick")
def test_merged_weights_keep_small_adapters_and_the_base(patched, pristine):
    for rank in patched:
        for dtype in ("float16", "bfloat16"):
            lost = rank[dtype].pop("lost")
            assert rank[dtype] == {"dtypes": ["float32"], "named_as_base": True, "repeats": True, "base_kept": True}
            assert lost < 1e-3
    assert pristine[0]["bfloat16"]["lost"] > 0.9, "most lie below half the distance of two values of bf16"


def test_merged_weight_is_a_copy_of_a_base_in_fp32_too():
    """On one rank FSDP2 passes the parameter itself."""
    weight = torch.ones(2, 2)
    merge_in_fp32(weight, None).add_(1)
    assert torch.equal(weight, torch.ones(2, 2))


@by_case("lora_merge_in_outer_units", fsdp="quick")
def test_merge_gathers_adapters_or_is_refused(row, patched):
    """FSDP2 has no such units: its ``min_num_params`` wraps nothing else."""
    for rank in patched:
        if row.strategy == "fsdp":
            assert rank.startswith("ValueError: lora.merge=true") and "wrap_policy.min_num_params=0" in rank
        else:
            assert rank < 1e-3


@by_case("lora_resume", fsdp="quick")
def test_lora_over_fp16_resumes_to_the_bit(patched):
    assert patched == [{"loaded": True, "next_step": True}] * 2


@by_case("lora_sync", fsdp="quick")
def test_base_is_offloaded_before_the_rollout_wakes(patched, pristine):
    """A GPU then contains either the trainer's base or the rollout's, also when the base is sent."""
    copied, adapters = ["load", "offload"], ["wake weights", "send adapters"]
    for rank in patched:
        assert rank == [[*copied, *copied, "wake weights", "send base", "send adapters"], [*copied, *adapters]]
    assert pristine[0][1] == ["wake weights", *copied, "send adapters"]
