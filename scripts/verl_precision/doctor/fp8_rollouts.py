"""List the vLLM versions to which a release of verl cannot send FP8 weights (``rollout.quantization=fp8``).

verl quantizes the trainer's weights itself and replaces vLLM's ``process_weights_after_loading``, whose code differs by
version.
"""

import re
from typing import NamedTuple

FP8_UTILS = "utils/vllm/vllm_fp8_utils.py"
MOE_FUNCTION = "needs the class FusedMoE, which vLLM 0.24 removed (vllm_quant_utils.py:95 of verl 0.9.0)"


class Limit(NamedTuple):
    """One line of a release that does not fit some versions of vLLM.

    Args:
        release: of verl.
        since, before: the versions that the line does not fit, from ``since`` on and below ``before``.
        line, text: its number in the release's FP8_UTILS, and a part of it.
        effect: what it does there, a clause whose subject is the line, with the source.
    """

    release: str
    since: tuple[int, int]
    before: tuple[int, int]
    line: int
    text: str
    effect: str


NEWEST = (1000, 0)
LIMITS = (
    Limit("0.7.0", (0, 24), NEWEST, 81, "isinstance(current_module, FusedMoE)", MOE_FUNCTION),
    Limit("0.7.0", (0, 14), (0, 24), 324, "del layer.weight_scale_inv",
          "removes the scales that vLLM reads from 0.14 on (vllm_fp8_utils.py:554 of verl 0.7.1)"),
    Limit("0.7.1", (0, 24), NEWEST, 76, "isinstance(current_module, FusedMoE)", MOE_FUNCTION),
    Limit("0.7.1", (0, 20), (0, 24), 301, "maybe_post_process_fp8_weight_block,",
          "imports a function that vLLM 0.20 removed (vllm_fp8_utils.py:711 of verl 0.8.0)"),
    Limit("0.8.0", (0, 24), NEWEST, 80, "isinstance(current_module, FusedMoE)", MOE_FUNCTION),
    Limit("0.8.0", (0, 20), (0, 24), 714, 'if vllm_ver >= version.parse("0.20.0"):',
          "is incomplete: syncs of a mixture of experts failed on B200s (verl #7136), and with DeepGEMM scales "
          "stayed zero (verl #7224)"),
    *(Limit(release, (0, 0), (0, 18), line, "it is used for vllm v0.18-v0.19", "needs vLLM 0.18 or later (verl #7190)")
      for release, line in (("0.9.0", 300), ("0.9.1", 309))),
)  # fmt: skip


def fp8_limit(release: str, vllm: str) -> Limit | None:
    """Return why a release of verl cannot send FP8 weights to this version of vLLM; None where no reason is known."""
    found = re.match(r"(\d+)\.(\d+)", vllm)
    if found is None:
        return None
    number = int(found[1]), int(found[2])
    return next((each for each in LIMITS if each.release == release and each.since <= number < each.before), None)


def fitting(release: str) -> str:
    """Return the versions of vLLM without a known reason against them, as a phrase."""
    limits = [each for each in LIMITS if each.release == release]
    least, most = max(each.before for each in limits), min(each.since for each in limits)
    return f"vLLM below {most[0]}.{most[1]}" if least == NEWEST else f"vLLM {least[0]}.{least[1]} or later"
