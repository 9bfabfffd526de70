# Copyright 2026 the verl-precision authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#      http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""The precision of an OAT run: one choice for learner and actors, and a loss scaler that reports what it does.

The module needs torch and the standard library alone. OAT calls it; it calls nothing of OAT. What it says of DeepSpeed
is of 0.16.8, which every release that it serves asks for.

Why: in fp16 on both sides the log-probabilities of learner and actor agree far better than in bf16 (Qi et al. 2025,
"Defeating the Training-Inference Mismatch via FP16", arXiv 2510.26788). fp16 needs a loss scale, which has to be
configured, kept and seen.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Literal, Optional

import torch

__all__ = [
    "PrecisionArgs",
    "deepspeed_sections",
    "gradient_norm",
    "largest_norm",
    "model_dtype",
    "on_the_wire",
    "patch_stamp",
    "report_precision",
    "resume_scaler",
    "rollout_dtype",
    "scaler_metrics",
    "settle_precision",
    "vllm_dtype",
    "wire_dtype",
    "write_metrics",
]

# What each regime trains in, and what its actors sample in.
_REGIMES = {
    "fp16": (torch.float16, torch.float16),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "bf16_train_fp16_infer": (torch.bfloat16, torch.float16),
    "fp32": (torch.float32, torch.float32),
}


@dataclass
class PrecisionArgs:
    """What every ``OATArgs`` has of precision. The names of the loss scaler's settings are DeepSpeed's."""

    # One choice for learner, critic, reference and actors: fp16, bf16, fp32, or bf16_train_fp16_infer, which trains in
    # bf16 and samples in fp16. None: what bf16 and fp16 say.
    precision: Optional[Literal["fp16", "bf16", "bf16_train_fp16_infer", "fp32"]] = None
    # --no-bf16 --fp16 is --precision fp16; --no-bf16 alone is --precision fp32.
    fp16: bool = False
    # fp16: a fixed loss scale; 0 makes it dynamic.
    loss_scale: float = 0.0
    # fp16: a dynamic loss scale starts at 2 to this power.
    initial_scale_power: int = 16
    # fp16: updates without an overflow after which a dynamic loss scale doubles.
    loss_scale_window: int = 1000
    # fp16: overflows before a dynamic loss scale is halved. With --zero_stage 0 each one halves it.
    hysteresis: int = 2
    # fp16: whether one update without an overflow gives the whole hysteresis back, not loss_scale_window of them.
    consecutive_hysteresis: bool = False
    # fp16: a dynamic loss scale is never halved below this; an overflow at it ends the run, but with --zero_stage 0.
    min_loss_scale: float = 1.0


def settle_precision(args: Any) -> None:
    """Decide the regime once: afterwards ``precision``, ``bf16`` and ``fp16`` say the same.

    ``bf16`` is on by default, so that ``--precision fp16`` beside it is no contradiction.

    Args:
        args: an ``OATArgs``; changed in place.

    Raises:
        ValueError: one line: a value that is not allowed, or keys that contradict each other.
    """
    said = f"precision={args.precision} bf16={args.bf16} fp16={args.fp16}"
    allowed = "must be --precision fp16 (or --no-bf16 --fp16), bf16 (or --bf16 --no-fp16), fp32 (or --no-bf16), or "
    allowed += "bf16_train_fp16_infer"
    if args.precision is None:
        if args.bf16 and args.fp16:
            raise ValueError(f"{said}: both bf16 and fp16; {allowed}")
        args.precision = "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"
    if args.precision not in _REGIMES:
        raise ValueError(f"precision={args.precision}: must be one of {', '.join(_REGIMES)}")
    trained = _REGIMES[args.precision][0]
    if args.fp16 and trained != torch.float16:
        raise ValueError(f"{said}: precision and fp16 contradict each other; {allowed}")
    if not args.bf16 and trained == torch.bfloat16:
        raise ValueError(f"{said}: precision and bf16 contradict each other; {allowed}")
    if args.load_in_4bit and trained != torch.bfloat16:
        raise ValueError(
            f"precision={args.precision} load_in_4bit=True: OAT computes with 4-bit weights in bf16 alone; "
            "precision must be bf16 or bf16_train_fp16_infer"
        )
    if args.flash_attn and trained == torch.float32:
        raise ValueError(
            f"precision={args.precision} flash_attn=True: flash attention computes in 16 bits alone; "
            "must be --no-flash_attn, or another precision"
        )
    if trained == torch.float16 and args.zero_stage < 2 and args.grad_accum_dtype not in (None, "fp16"):
        raise ValueError(
            f"precision={args.precision} zero_stage={args.zero_stage} grad_accum_dtype={args.grad_accum_dtype}: "
            "DeepSpeed 0.16.8 does not average such gradients over ranks; must be --zero_stage 2 or 3, "
            "or --grad_accum_dtype None"
        )
    args.bf16, args.fp16 = trained == torch.bfloat16, trained == torch.float16
    for name, holds, must in (
        ("loss_scale", 0 <= args.loss_scale < math.inf, "0 (dynamic) or a positive number"),
        ("initial_scale_power", 0 <= args.initial_scale_power <= 32, "from 0 to 32"),
        ("loss_scale_window", args.loss_scale_window >= 1, "1 or more"),
        ("hysteresis", args.hysteresis >= 1, "1 or more"),
        ("min_loss_scale", 0 < args.min_loss_scale < math.inf, "a positive number"),
    ):
        if not holds:
            raise ValueError(f"{name}={getattr(args, name)}: must be {must}")
    if args.loss_scale == 0 and args.min_loss_scale > 2**args.initial_scale_power:
        raise ValueError(
            f"min_loss_scale={args.min_loss_scale} initial_scale_power={args.initial_scale_power}: "
            f"min_loss_scale must not be above the first loss scale, {2**args.initial_scale_power}"
        )


def model_dtype(bf16: bool, fp16: bool) -> torch.dtype:
    """What a model's weights are loaded in: never the checkpoint's own dtype, which no engine would know of."""
    return torch.bfloat16 if bf16 else torch.float16 if fp16 else torch.float32


def rollout_dtype(args: Any) -> torch.dtype:
    """What the actors sample in, and what weights are sent to them in."""
    if args.precision is not None:
        return _REGIMES[args.precision][1]
    return model_dtype(args.bf16, args.fp16)  # arguments that settle_precision has not seen


def vllm_dtype(args: Any) -> str:
    """``rollout_dtype`` by the name that vLLM takes as its ``dtype``."""
    return _name(rollout_dtype(args))


def deepspeed_sections(args: Any) -> dict[str, dict[str, Any]]:
    """The sections ``bf16`` and ``fp16`` of a DeepSpeed config.

    Every setting of a dynamic loss scale is named: where none is, DeepSpeed starts at 2**32 with a hysteresis of 1
    instead of at its documented defaults.
    """
    scaler = {
        name: getattr(args, name)
        for name in (
            "loss_scale",
            "initial_scale_power",
            "loss_scale_window",
            "hysteresis",
            "consecutive_hysteresis",
            "min_loss_scale",
        )
    }
    return {"bf16": {"enabled": args.bf16}, "fp16": {"enabled": args.fp16, **(scaler if args.fp16 else {})}}


def wire_dtype(weight: torch.Tensor, args: Any) -> torch.dtype:
    """What a weight is sent to the actors in. vLLM's workers assert that it is their own dtype."""
    return rollout_dtype(args) if weight.is_floating_point() else weight.dtype


def on_the_wire(name: str, weight: torch.Tensor, args: Any) -> torch.Tensor:
    """A weight as it is sent: itself where its dtype is the actors', else a copy in theirs.

    bf16 to fp16 is exact for 2**-17 <= |w| <= 65504. Below, it rounds to a multiple of 2**-24, so that a weight
    smaller than 2**-25 becomes 0; above, fp16 has only inf.

    Raises:
        ValueError: the copy is not finite, in one line with the weight's name: an actor would sample from it.
    """
    sent = weight.to(wire_dtype(weight, args))
    if sent.dtype != weight.dtype and not torch.isfinite(sent).all():
        if not torch.isfinite(weight).all():
            raise ValueError(f"{name}: has an inf or NaN already in {_name(weight.dtype)}, before it is sent")
        raise ValueError(
            f"{name}: max |w| is {weight.abs().max().item()}; {_name(sent.dtype)}, in which the actors sample, ends at "
            f"{torch.finfo(sent.dtype).max}: precision={args.precision} must be bf16 for this model"
        )
    return sent


def gradient_norm(engine: Any, full_gradient: Callable[[torch.nn.Parameter], Optional[torch.Tensor]]) -> torch.Tensor:
    """The norm of an fp16 engine's gradients between backward and step, without the loss scale.

    ZeRO-1 and 2 give their gradients a new dictionary when a step is skipped, while each parameter keeps the old one:
    from then on ``safe_get_full_grad`` reads the gradients that overflowed. So the parameters are given the new one.

    Args:
        engine: a DeepSpeedEngine in fp16.
        full_gradient: DeepSpeed's ``safe_get_full_grad``, a collective call.

    Returns:
        A number on the CPU, in fp32; inf or NaN where a gradient is, and the step will be skipped.
    """
    averaged = getattr(engine.optimizer, "averaged_gradients", None)
    squared = torch.tensor(0.0)
    for parameter in engine.module.parameters():
        mapping = getattr(parameter, "_hp_mapping", None)
        if mapping is not None and averaged is not None:
            mapping.gradient_dict = averaged
        gradient = full_gradient(parameter)
        if gradient is not None:  # in fp16 a norm ends at 65504
            squared += gradient.norm(2, dtype=torch.float32).cpu() ** 2
    return squared.sqrt() / engine.optimizer.cur_scale


def largest_norm(norms: list[torch.Tensor], args: Any) -> dict[str, torch.Tensor]:
    """OAT's ``policy_grad_norm`` of a learning step; in fp16 of the updates that were taken, absent where none was."""
    if args.fp16:
        norms = [norm for norm in norms if torch.isfinite(norm)]
        if not norms:
            return {}
    return {"policy_grad_norm": torch.tensor(norms).max()}


def scaler_metrics(learner: Any) -> dict[str, float]:
    """What the loss scalers of a learner did since the last report; nothing without an update since, or without fp16.

    ``train/loss_scale``, which the next update is made with; ``train/skipped_steps``, since the last report;
    ``train/overflow``, 1 where the last update was skipped; the critic's with ``train/critic_``.
    """
    metrics = {}
    for prefix, engine in (("train/", learner.model.model), ("train/critic_", getattr(learner, "critic", None))):
        if engine is None or not engine.fp16_enabled():
            continue
        updates, skipped = getattr(engine, "_last_reported", (0, 0))
        if engine.global_steps == updates:
            continue
        metrics[f"{prefix}loss_scale"] = float(engine.optimizer.cur_scale)
        metrics[f"{prefix}skipped_steps"] = float(engine.skipped_steps - skipped)
        metrics[f"{prefix}overflow"] = float(engine.optimizer.overflow)
        engine._last_reported = (engine.global_steps, engine.skipped_steps)
    return metrics


def resume_scaler(engine: Any, configured: Any) -> None:
    """After a checkpoint was loaded: the loss scale goes on from it, by this run's settings.

    DeepSpeed's ZeRO optimizers take the whole scaler from the checkpoint, settings included, also whether it is
    dynamic. Where one of both is and the other is not, the loss scale starts anew. (A checkpoint in bf16 cannot be
    resumed in fp16: DeepSpeed names its files otherwise.)

    Args:
        engine: a DeepSpeedEngine.
        configured: its optimizer's ``loss_scaler`` before the checkpoint was loaded; None where it has none.
    """
    engine._last_reported = (engine.global_steps, engine.skipped_steps)
    if configured is None or not engine.fp16_enabled():
        return
    loaded = engine.optimizer.loss_scaler
    engine.optimizer.loss_scaler = configured
    engine.optimizer.dynamic_loss_scale = configured.dynamic
    if configured.dynamic and loaded.dynamic:
        configured.cur_scale = max(loaded.cur_scale, configured.min_scale)
        configured.cur_iter, configured.last_overflow_iter = loaded.cur_iter, loaded.last_overflow_iter
        configured.cur_hysteresis = min(loaded.cur_hysteresis, configured.delayed_shift)
    elif configured.dynamic != loaded.dynamic:
        kind = {True: "a dynamic loss scale", False: f"a fixed loss scale of {loaded.cur_scale}"}
        print(f"[oat-precision] the checkpoint has {kind[loaded.dynamic]}: it starts anew at {configured.cur_scale}")


def patch_stamp() -> Optional[dict[str, str]]:
    """What ``patchset.py apply`` wrote beside this file: ``release``, ``stack``, ``tree``; ``None`` without it."""
    stamp = Path(__file__).with_name("precision_stamp.json")
    return json.loads(stamp.read_text()) if stamp.exists() else None


def report_precision(learner: Any) -> None:
    """Print what the engines really have, a line a role, and write it with all arguments to ``args.json``; rank 0 does.

    The actors' dtype is what they are asked for; their workers assert it with each weight that they receive.
    """
    if not learner.strategy.is_rank_0():
        return
    args = learner.args
    engines = {"actor": learner.model.model, "critic": getattr(learner, "critic", None)}
    engines["ref"] = getattr(getattr(learner, "ref_model", None), "model", None)
    effective = {role: _facts(engine) for role, engine in engines.items() if engine is not None}
    if learner.actors:
        effective["rollout"] = {"strategy": "vllm", "wire": vllm_dtype(args), "rollout": vllm_dtype(args)}
    stamp = patch_stamp()
    for role, facts in effective.items():
        print(f"[oat-precision] {json.dumps({'role': role, 'rank': 0, **facts, 'stamp': stamp})}", flush=True)
    # JSON has neither inf, which is the default of some, nor enums.
    given = {name: value if _is_json(value) else str(value) for name, value in vars(args).items()}
    content = {"precision": args.precision, "stamp": stamp, "effective": effective, "args": given}
    (Path(learner.save_path) / "args.json").write_text(json.dumps(content, indent=1) + "\n")


def write_metrics(learner: Any, logs: dict[str, Any]) -> None:
    """Append what OAT logs to ``metrics.jsonl`` in the run's folder, as verl's file logger does; rank 0 alone calls it.

    A line is ``{"step": the learning round, "data": {name: number}}``; NaN and inf are null. The evaluation before the
    first round has step 0; the one after the last repeats the last round's metrics under its step.
    """
    step = int(logs.get("train/learning_round", learner.steps))
    data = {name: float(value) for name, value in logs.items()}
    data = {name: value if math.isfinite(value) else None for name, value in data.items()}
    with open(Path(learner.save_path) / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": step, "data": data}) + "\n")


def _facts(engine: Any) -> dict[str, Any]:
    """What an engine computes in, accumulates and reduces gradients in, and keeps its masters in, as it is now."""
    compute = {_name(p.dtype) for p in engine.module.parameters() if p.is_floating_point()}
    facts = {"strategy": f"zero{engine.zero_optimization_stage()}", "compute": "+".join(sorted(compute))}
    optimizer = engine.optimizer
    if not hasattr(optimizer, "param_groups"):  # none; ZeRO-3 gives an engine that does not train one without
        return facts
    masters = getattr(optimizer, "fp32_partitioned_groups_flat", None)  # ZeRO-3, whose param_groups are empty
    if masters is None:
        masters = [p for group in optimizer.param_groups for p in group["params"]]
    facts["accumulate"] = _name(engine.get_data_types()[1])
    facts["reduce"] = _name(engine.communication_data_type)
    facts["master"] = "+".join(sorted({_name(p.dtype) for p in masters}))
    facts["loss_scaling"] = engine.fp16_enabled()
    return facts


def _name(dtype: torch.dtype) -> str:
    return str(dtype).split(".")[-1]


def _is_json(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, (list, tuple)):
        return all(map(_is_json, value))
    return value is None or isinstance(value, (bool, int, str))
