"""Routers of mixtures of experts in fp32: those that the model's class lists, those that the config names."""

from support.engine_rows import by_case


@by_case("listed_routers", fsdp="quick")
def test_what_the_models_class_lists_is_gathered_in_fp32(patched, pristine):
    for rank in pristine:
        assert {dtype: result["dtypes"] for dtype, result in rank.items()} == {}
    for rank in patched:
        assert rank == {}


@by_case("kept_routers", fsdp="quick")
def test_kept_routers_score_in_fp32(patched):
    for rank in patched:
        assert rank == {}
