"""Routers of mixtures of experts in fp32: those that the model's class lists, and those that the config names."""

from support.engine_rows import by_case


def expected(router: str, around: str) -> dict:
    """Return a router's outcome by the dtype that it scores in; ``experts`` gets hidden states and scores."""
    return {"weight": router, "experts": [around, router, around], "wire": "float32", "trained": True}


@by_case("listed_routers", fsdp="quick")
def test_routers_that_the_class_lists_score_in_fp32(patched, pristine):
    for ranks, in_fp32 in ((patched, True), (pristine, False)):
        for rank in ranks:
            for dtype, result in rank.items():
                assert result == expected("float32" if in_fp32 else dtype, dtype)


@by_case("kept_routers", fsdp="quick")
def test_routers_that_the_config_names_score_in_fp32(patched):
    for rank in patched:
        for family, result in rank.items():
            assert result == expected("float32", "float16"), family
