"""The cases of one release: its own workers, on two gloo ranks with the tree on PYTHONPATH.

    cases.py RELEASE MODEL_DIR OUT_DIR CASE ...

Each case is a behaviour of ``behaviours.py`` and returns a short text of discrete facts, which rank r writes to
OUT_DIR/rank_r.json. A text, not a verdict: an unpatched tree runs the same cases, and its outcomes are compared with
the predicted ones.
"""

import contextlib
import gc
import io
import itertools
import json
import math
import re
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import harness
import inert_cases
import inert_job_cases
import torch
import torch.distributed as dist
from harness import ENGINE, LEGACY, OUT, OWN_FP16, PATCHED, RANK, RELEASE, REWARD_MODEL, Worker, batch, composed, fp16
from mixed_dtype_cases import lora_base, modules_listed, routers_named, routers_rollout
from observations import inner_dtypes, name, numbers, poison, same, scale_of, state, watch
from omegaconf import OmegaConf
from rollout_cases import empty_adapter, hf_rollout, wire, wire_merged_lora
from sft_cases import engine_sft_trainer, lora_base_sft, overflow_sft, sft
from support.parsed_once import yaml_parsed_once
from support.waiting import STUCK_S
from trainer_cases import REQUEST, advantages, bypass_mode, equal_share, rewards_with_nan
from transformers import AutoModelForCausalLM

from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl_precision.patch.releases import Release


def dtype(role: str) -> str:
    """Return the dtypes of a role in the regime fp16."""
    worker = Worker(role, composed("+precision=fp16"))
    observed = watch(worker.module)
    output = worker.forward(batch(0))
    facts = [inner_dtypes(observed)]
    if role != "critic":  # its head is newly initialized
        error = (output - harness.reference_log_probs()).abs().max().item()
        facts.append("log-probs as " + ("float32" if error < 1e-4 else "float16" if error < 0.005 else "bfloat16"))
    if role != "ref":
        seeds = itertools.count()
        while not worker.optimizer.state:  # the first steps may overflow at the initial scale
            worker.update(batch(next(seeds)))
        facts.append(f"masters {name(next(worker.module.parameters()).dtype)}")
        adam = {name(entry["exp_avg"].dtype) for entry in worker.optimizer.state.values()}
        facts.append(f"Adam {', '.join(adam)}")
    facts.append("scaler" if worker.scaler is not None else "no scaler")
    return ", ".join(facts)


def flowrl(overlay: str) -> str:
    """Compare FlowRL's own spelling of a regime with the overlay, in every key."""
    trained = "float16" if overlay == "fp16" else "bfloat16"
    roles = {"actor": trained, "ref": trained, "rollout": "float16"}
    spelled = composed(*(f"actor_rollout_ref.{role}.dtype={dtype}" for role, dtype in roles.items()))
    ours, theirs = (
        OmegaConf.to_container(OmegaConf.masked_copy(config, ["actor_rollout_ref", "critic", "data"]), resolve=True)
        for config in (spelled, composed(f"+precision={overlay}"))
    )
    return "as the overlay" if ours == theirs else "ANOTHER CONFIG"


def overflow(role: str) -> str:
    """Put inf, then NaN into one gradient of rank 1 and follow weights, Adam state and the scale."""
    worker = fp16(role, init_scale=1024.0)
    worker.update(batch(0))
    facts = []
    for seed, value in enumerate((math.inf, math.nan), start=1):
        before, scale = state(worker), scale_of(worker)
        poison(worker, value)
        worker.update(batch(seed))
        facts.append("skipped" if same(before, state(worker)) else "STEPPED")
        facts.append("no scale" if scale is None else f"scale times {scale_of(worker) / scale:g}")
    before, steps = state(worker), adam_steps(worker)
    worker.update(batch(3))
    after = state(worker)
    moves = not same(before, after) and all(bool(tensor.isfinite().all()) for tensor in after)
    if adam_steps(worker) != steps + 1:
        facts.append(f"{adam_steps(worker) - steps} STEPS AT ONCE")
    return ", ".join([*facts, "next step taken" if moves else "NEXT STEP NOT TAKEN"])


def adam_steps(worker: Worker) -> int:
    return max(int(entry["step"]) for entry in worker.optimizer.state.values())


def scaler_keys(role: str) -> str:
    """Record the scale after each of four steps and an overflow, with every setting set by its key."""
    given = {"init_scale": 1024, "growth_interval": 2, "growth_factor": 4, "backoff_factor": 0.25}
    keys = [f"{ENGINE[role]}.grad_scaler.{key}={value}" for key, value in given.items()]
    worker = Worker(role, composed("+precision=fp16", *keys))
    scales = []
    for seed in range(5):
        if seed == 4:
            poison(worker)
        worker.update(batch(seed))
        scales.append(f"{scale_of(worker):g}")
    return ", ".join(scales)


def metrics(role: str) -> str:
    """Return the metrics of a taken and of a skipped update; a patched tree's norm must be near that in bf16."""
    torch.manual_seed(0)  # the critic's head
    worker = fp16(role, init_scale=1024.0)
    facts = []
    for kind in ("taken", "skipped"):
        if kind == "skipped":
            poison(worker)
        update = worker.update(batch(0))
        shown = [f"{key} {numbers(update[key])[0]:g}" for key in ("skipped_steps", "loss_scale") if key in update]
        if "grad_norm" in update:
            finite = all(map(math.isfinite, numbers(update["grad_norm"])))
            shown.append("grad_norm finite" if finite else "grad_norm NOT FINITE")
            if PATCHED and not 0.5 < numbers(update["grad_norm"])[0] / norm_in_bf16(role) < 2:
                shown.append("NOT THAT OF THE LOSS")
        facts.append(f"{kind}: {', '.join(shown)}")
    return "; ".join(facts)


def norm_in_bf16(role: str) -> float:
    """Return the norm of an update of the same weights by the same batch, without a loss scale."""
    torch.manual_seed(0)  # the critic's head
    return numbers(Worker(role, composed()).update(batch(0))["grad_norm"])[0]


def learning_rate(role: str) -> str:
    """Follow the schedule over updates of two mini-batches: one is skipped, then both."""
    worker = fp16(role, init_scale=1024.0)
    facts = []
    for skips in (1, 2):
        before = worker.optimizer.param_groups[0]["lr"]
        poison(worker, times=skips)
        worker.update(batch(skips, rows=8))
        moved = worker.optimizer.param_groups[0]["lr"] != before
        facts.append(f"{skips} of 2 skipped: {'moves on' if moved else 'held'}")
    return ", ".join(facts)


def checkpoint(role: str) -> str:
    """Save after an overflow and a clean step and load into a fresh worker, then load without the scaler's state."""
    folder = harness.shared_folder()
    worker = fp16(role, init_scale=1024.0)
    worker.update(batch(0))
    poison(worker)
    worker.update(batch(1))
    worker.update(batch(2))
    saved, scale = state(worker), scale_of(worker)
    worker.save(folder)
    fresh = fp16(role, init_scale=1024.0)
    fresh.load(folder)
    facts = ["state comes back" if same(saved, state(fresh)) else "STATE LOST"]
    if scale is None:
        facts.append("no scale")
    else:
        facts.append(
            "scale comes back" if scale_of(fresh) == scale else f"scale {scale:g} resumes at {scale_of(fresh):g}"
        )
    for each in (worker, fresh):
        each.update(batch(3))
    facts.append("same next step" if same(state(worker), state(fresh)) else "ANOTHER NEXT STEP")

    extra = Path(folder) / f"extra_state_world_size_2_rank_{RANK}.pt"
    content = torch.load(extra, weights_only=False)
    content.pop("grad_scaler", None)
    torch.save(content, extra)
    dist.barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fp16(role, init_scale=1024.0).load(folder)
    texts = [str(warning.message) for warning in caught if "loss scale" in str(warning.message)]
    warned = len(texts) == 1 and "contains no loss scale: starting at 1024" in texts[0]
    return ", ".join([*facts, "an older checkpoint warns" if warned else "an older checkpoint gives no warning"])


def storm(role: str) -> str:
    """Overflow in every step, until the run ends above the scale's floor and names the gradient."""
    worker = fp16(role, init_scale=8.0, min_scale=2.0, max_consecutive_skips=3)
    for step in range(1, 6):
        poison(worker, which=-1)
        try:
            worker.update(batch(step))
        except RuntimeError as error:
            named = re.search(r"first non-finite gradient: \S+\.weight in the shard of rank 1,", str(error))
            where = "names the gradient and its rank" if named else "NAMES NO GRADIENT"
            return f"{type(error).__name__} in step {step}, scale {scale_of(worker):g}, {where}"
    return "goes on"


ACTOR = "actor_rollout_ref.actor"
# Invalid overrides by name, with the words that the refusal must contain.
REFUSED = {
    "an unknown dtype": ([f"++{ACTOR}.dtype=banana"], ["dtype=banana", "float16"]),
    "keys that contradict": (
        [f"++{ACTOR}.dtype=bfloat16", f"++{ACTOR}.fsdp_config.dtype=float16"],
        ["dtype=bfloat16", "dtype=float16", "contradict"],
    ),
    "fp16 masters": (
        ["+precision=fp16", f"++{ACTOR}.fsdp_config.model_dtype=fp16"],
        ["model_dtype=fp16", "model_dtype=fp32"],
    ),
    "an unknown rollout dtype": (
        ["+precision=fp16", "actor_rollout_ref.rollout.dtype=banana"],
        ["dtype=banana", "bfloat16"],
    ),
}
if RELEASE.has("hf_rollout"):  # samples from the trained module, whose weights FSDP2 gathers in the training dtype
    REFUSED["fp16 from an hf rollout of bf16"] = (
        ["actor_rollout_ref.rollout.name=hf", "actor_rollout_ref.rollout.dtype=float16"],
        ["dtype=float16", "name=hf", "dtype=bfloat16"],
    )
# The model engine of these releases autocasts in bf16 without loss scaling.
MODEL_ENGINE = ["+precision=fp16", "trainer.use_legacy_worker_impl=disable"]


def validate(config) -> None:
    """Check a configuration as the driver does before it starts a worker."""
    if RELEASE.has("validate_config"):
        from verl.utils.config import validate_config

        validate_config(config, use_reference_policy=True, use_critic=True)
    else:
        trainer = object.__new__(RayPPOTrainer)
        trainer.config, trainer.use_reference_policy, trainer.use_critic = config, True, True
        trainer._validate_config()


def accepts(check: Callable[[], None], words: list[str]) -> str | None:
    """Return ``None`` if ``check`` raises one line with all of ``words``, else the error's type, or "" without one."""
    try:
        check()
    except Exception as error:
        while error.__cause__ is not None:  # Hydra's instantiate wraps it
            error = error.__cause__
        whole = "\n" not in str(error) and all(word in str(error) for word in words)
        return None if whole else f" ({type(error).__name__})"
    return ""


def refusals() -> str:
    """Return the bad input that the driver does not refuse by one line with key, value and allowed values."""
    validate(composed())
    validate(composed("+precision=fp16"))
    checks = {
        what: accepts(lambda overrides=overrides: validate(composed(*overrides)), words)
        for what, (overrides, words) in REFUSED.items()
    }
    if LEGACY and RELEASE.has("engine_dtype"):
        words = ["float16", MODEL_ENGINE[1], "bfloat16"]
        checks["fp16 on the model engine"] = accepts(lambda: validate(composed(*MODEL_ENGINE)), words)
        words = ["float16", "SFT", "bfloat16"]
        checks["fp16 in its SFT"] = accepts(lambda: engine_sft_trainer("+precision=fp16"), words)
    accepted = [f"{what}{error}" for what, error in checks.items() if error is not None]
    return f"takes {', '.join(accepted)}" if accepted else "refuses all"


def reward_model() -> str:
    """Return the dtypes in which the reward model scores."""
    worker = harness.reward_worker(composed("+precision=fp16", *REWARD_MODEL))
    observed = watch(worker.reward_module)
    worker.compute_rm_score(batch(0))
    return inner_dtypes(observed)


def export() -> str:
    """Export and merge a model whose weights are exact in fp16 and not in bf16, and compare the weights."""
    from verl.model_merger.base_model_merger import ModelMergerConfig
    from verl.model_merger.fsdp_model_merger import FSDPModelMerger

    folder = Path(harness.shared_folder())
    contents = f"{ACTOR}.checkpoint.save_contents=[model,optimizer,extra,hf_model]"
    own = ["+precision=fp16"] if PATCHED else OWN_FP16
    worker = Worker("actor", composed(*own, contents))
    with torch.no_grad():
        for parameter in worker.module.parameters():
            parameter.copy_(parameter.half().float())
    weights = {path: tensor.full_tensor() for path, tensor in worker.module.state_dict().items()}
    worker.save(str(folder))
    outcome = [""]
    if RANK == 0:
        exported = folder / "huggingface"
        merger = ModelMergerConfig(
            operation="merge",
            backend="fsdp",
            local_dir=str(folder),
            target_dir=str(folder / "merged"),
            hf_model_config_path=str(exported),
        )
        FSDPModelMerger(merger).merge_and_save()
        models = {"exported": exported, "merged": folder / "merged"}
        kept = {key: AutoModelForCausalLM.from_pretrained(path, dtype="auto") for key, path in models.items()}
        outcome[0] = ", ".join(
            f"{key} as {name(model.dtype)} "
            + (
                "exactly"
                if all(torch.equal(t.float(), weights[p]) for p, t in model.state_dict().items())
                else "ROUNDED"
            )
            for key, model in kept.items()
        )
    dist.broadcast_object_list(outcome)
    return outcome[0]


def nan_reward() -> str:
    """Compute advantages of four rewards, one of them NaN, where a precision is requested."""
    try:
        data = advantages(rewards_with_nan(), *REQUEST)
    except ValueError as error:
        return str(error).partition(" (")[0]
    return f"trains on {int(data.batch['advantages'].isnan().any(-1).sum())} rows of NaN"


def reports() -> str:
    """Return the dtypes that each worker logs when it is built."""
    facts = []
    for role in ("actor", "ref", "critic"):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            Worker(role, composed("+precision=fp16"))
        lines = [line for line in printed.getvalue().splitlines() if line.startswith("[verl-precision] ")]
        logged = [json.loads(line.removeprefix("[verl-precision] ")) for line in lines]
        assert all(each["strategy"] == harness.STRATEGY and each["rank"] == RANK for each in logged), logged
        facts += [f"{each['role']} {each['compute']}" for each in logged]
    return ", ".join(facts) or "nothing"


Case = Callable[..., str]
ROLES, TRAINED, REGIMES = ("actor", "ref", "critic"), ("actor", "critic"), ("fp16", "bf16_train_fp16_infer")


def named(*cases: Case, each: tuple[str, ...] = ()) -> dict[str, Case]:
    """Return the cases by name; if ``each`` of some words is an argument of theirs, named after both."""
    if not each:
        return {case.__name__: case for case in cases}
    return {f"{case.__name__}_{word}": partial(case, word) for case, word in itertools.product(cases, each)}


def cases_of(release: Release) -> tuple[dict[str, dict[str, Case]], dict[str, Case], dict[str, Case]]:
    """Return the cases of a release: those without a key by strategy, all others, and those of only FSDP2.

    The last are independent of the strategy, or gather all weights, which fails under FSDP1 on a CPU.
    """
    bits = named(inert_cases.inert, each=ROLES) | named(inert_cases.inert_lora, each=("fp32", "bf16"))
    inert = named(inert_cases.inert_checkpoint, each=TRAINED) | named(inert_cases.inert_fp32, each=ROLES)
    inert |= named(inert_cases.inert_attention, inert_cases.inert_lora_critic)
    inert |= named(inert_job_cases.inert_config, inert_job_cases.inert_trainer)
    inert["inert_driver"] = partial(inert_job_cases.inert_driver, validate)
    both = named(dtype, each=ROLES) | named(overflow, metrics, storm, checkpoint, each=TRAINED)
    once = named(scaler_keys, learning_rate, each=TRAINED) | named(flowrl, each=REGIMES)
    once |= named(reports, refusals, nan_reward, export, equal_share)
    both |= named(lora_base)
    if release.has("bypass_mode"):
        once |= named(bypass_mode)
    if release.has("hf_rollout"):
        both |= named(hf_rollout, each=REGIMES)
        inert |= named(inert_cases.inert_hf_rollout)
    if not release.has("sharding_manager"):  # imports a vLLM that has no CPU build
        once |= named(wire, empty_adapter)
        inert |= named(inert_cases.inert_wire)
    if not LEGACY:
        once |= named(wire_merged_lora, routers_rollout)
        both |= named(routers_named, modules_listed)
        inert |= named(inert_cases.inert_listed)
    if release.name == "0.9.1":  # the first with a key for it
        bits |= named(inert_cases.inert_accumulation)
    if release.has("reward_worker"):
        both |= named(reward_model)
        bits |= named(inert_cases.inert_reward_model)
    if LEGACY and release.has("engine_policy"):
        inert |= named(inert_cases.inert_engine)
    if not release.has("sft_trainer"):
        inert |= named(inert_job_cases.inert_engine_sft)
    if release.has("sft_trainer"):
        both |= named(overflow_sft, lora_base_sft)
        bits |= named(inert_job_cases.inert_sft)
    if release.has("sft_trainer") or not LEGACY:  # elsewhere the model engine trains only in bf16
        both |= named(sft)
    return {"fsdp": bits, "fsdp2": bits | inert}, both, once


def main() -> None:
    # A rank that waits for another fails after this, not after half an hour.
    dist.init_process_group("gloo", timeout=timedelta(seconds=STUCK_S))
    gc.freeze()  # verl calls gc.collect() often: exclude everything imported so far
    inert, both, once = cases_of(RELEASE)
    # An unpatched tree runs under FSDP2 only, except for what is compared bitwise: these cases come first, so that
    # what a process does once, such as some warnings, is done in the same cases of each tree.
    cases = [*inert.items(), ("fsdp", both if PATCHED else {}), ("fsdp2", both | once)]
    outcomes: dict[str, dict[str, str]] = {}
    with yaml_parsed_once():
        for strategy, of_strategy in cases:
            harness.STRATEGY = strategy
            for case in sorted(set(sys.argv[4:]) & of_strategy.keys()):
                outcomes.setdefault(case, {})[strategy] = attempt(case, of_strategy[case])
    (OUT / f"rank_{RANK}.json").write_text(json.dumps({case: common(texts) for case, texts in outcomes.items()}))


def common(texts: dict[str, str]) -> str:
    """Return the outcome under all strategies, or each strategy's where they differ."""
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return "; ".join(f"{strategy}: {text}" for strategy, text in texts.items())


def attempt(name: str, case: Case) -> str:
    """Return the outcome of a case, the same on every rank; errors are outcomes too, since some are predicted."""
    start = time.monotonic()
    try:
        outcome = case()
        print(f"{harness.STRATEGY} {name} {time.monotonic() - start:.1f} s", flush=True)
        return outcome
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


if __name__ == "__main__":
    main()
