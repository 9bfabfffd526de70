"""The cases without a precision key of what is around the workers: configurations, the driver, the trainer, SFT."""

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
from harness import ENGINE, RELEASE, VERL, batch, composed, shared_folder
from hydra import compose, initialize_config_dir
from inert import Seen, without_added
from inert_cases import FEW, on_the_cpu
from observations import poison, spoil
from omegaconf import OmegaConf
from sft_cases import engine_sft_trainer, legacy_sft_trainer, sft_batch
from trainer_cases import Trainer, advantages, rewards_with_nan

CONFIGS = ("ppo_trainer", "ppo_megatron_trainer", "sft_trainer", "sft_trainer_engine")


def inert_config() -> str:
    """Compose the release's own configurations."""
    seen = Seen("inert_config")
    for name in (name for name in CONFIGS if (VERL / f"trainer/config/{name}.yaml").exists()):
        with initialize_config_dir(str(VERL / "trainer/config"), version_base=None):
            whole = compose(name, overrides=["critic.model.path=x"] if "ppo" in name else [])
        seen.note(name, OmegaConf.to_yaml(without_added(OmegaConf.to_container(whole, resolve=True))))
    return seen.outcome()


def inert_driver(validate: Callable) -> str:
    """Check configurations of upstream's own keys as the driver does before it starts a worker."""
    seen = Seen("inert_driver")
    for keys in (
        [],
        ["actor_rollout_ref.rollout.dtype=banana"],
        ["actor_rollout_ref.rollout.dtype=auto"],
        *([f"++{ENGINE[role]}.mixed_precision={{param_dtype:bf16}}"] for role in ENGINE),
        *([f"++{ENGINE[role]}.mixed_precision={{param_dtype:fp32}}"] for role in ENGINE),
        [f"++{ENGINE['actor']}.mixed_precision={{param_dtype:bf16,reduce_dtype:bf16}}"],
        [f"++{ENGINE['actor']}.mixed_precision={{param_dtype:bf16,reduce_dtype:banana}}"],
        *([f"++{ENGINE[role]}.model_dtype=bf16"] for role in ENGINE),
    ):
        seen.attempt(f"{keys}", lambda keys=keys: validate(composed(*keys)))
    return seen.outcome()


def inert_trainer() -> str:
    """Compute advantages of a NaN, and log-probabilities as the trainer's loop does, in bypass mode, too."""
    seen = Seen("inert_trainer")
    done = seen.attempt("reward", lambda: advantages(rewards_with_nan()))
    seen.note("advantages", dict(done.batch) if done else None)
    modes = {"plain": []}
    if RELEASE.has("bypass_mode"):
        modes["bypass"] = ["++algorithm.rollout_correction.bypass_mode=true"]
    for mode, keys in modes.items():
        trainer = Trainer(*keys)
        for step, moved in enumerate((0.0, 2.0**-12), start=1):
            label = f"{mode} {step}"
            rollout = trainer.sampled + moved
            result = seen.run(label, lambda t=trainer, s=step, r=rollout: t.step(s, r))
            seen.note(f"{label} log-probs", result[0])
            seen.metrics(label, result[1])
    return seen.outcome()


# Upstream's own keys of SFT that are no request.
SFT_KEYS = {"fp32": ["++model.fsdp_config.mixed_precision={param_dtype:fp32}"], "LoRA": ["model.lora_rank=4"]}
SFT_KEYS["LoRA over bf16"] = ["model.lora_rank=4", "++model.fsdp_config.model_dtype=bf16"]


def inert_sft() -> str:
    """Train SFT by its own trainer, over an inf, and save; a step with upstream's own keys, and with adapters."""
    seen = Seen("inert_sft")
    trainer = seen.run("build", legacy_sft_trainer)
    backward = trainer._compute_loss_and_backward

    def poisoned(*args, **kwargs):
        loss = backward(*args, **kwargs)
        spoil(trainer.fsdp_model, math.inf)
        return loss

    for seed, label in enumerate(FEW):
        trainer._compute_loss_and_backward = poisoned if label == "inf" else backward
        sft_step(seen, label, trainer, seed)
    if hasattr(trainer, "checkpoint_manager"):  # 0.4.1 saves only the weights
        folder = shared_folder()
        seen.run("save", lambda: trainer.checkpoint_manager.save_checkpoint(folder, global_step=1))
        seen.files("saved", Path(folder))
    for label, keys in SFT_KEYS.items():
        sft_step(seen, label, seen.run(f"build {label}", lambda keys=keys: legacy_sft_trainer(*keys)), 0)
    return seen.outcome()


def sft_step(seen: Seen, label: str, trainer, seed: int) -> None:
    seen.metrics(label, seen.run(label, lambda: trainer.training_step(sft_batch(seed))))
    seen.state(label, trainer.fsdp_model, trainer.optimizer)


def inert_engine_sft() -> str:
    """Train SFT on the model engine, over an inf."""
    from engine_worker import infer

    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding

    seen = Seen("inert_engine_sft")
    trainer = seen.run("config", lambda: engine_sft_trainer("engine.use_torch_compile=false"))
    fp32 = "++engine.mixed_precision={param_dtype:fp32}"
    seen.attempt("config of fp32", lambda: engine_sft_trainer(fp32))
    sizes = {"micro_batch_size_per_gpu": 2, "infer_micro_batch_size_per_gpu": 2, "use_dynamic_bsz": False}
    for key, size in sizes.items():
        setattr(trainer.engine_config, key, size)
    trainer.optimizer_config.total_training_steps = 10
    seen.run("build", trainer._build_engine)
    seen.run("start", trainer.training_client.reset)
    engine = trainer.engine
    worker = SimpleNamespace(policy=engine, module=engine.module, step_name="optimizer_step")
    for seed, label in enumerate(FEW):
        data = left_right_2_no_padding(batch(seed).to_tensordict())
        data["loss_mask"] = torch.nested.as_nested_tensor([torch.ones(12)] * 4, layout=torch.jagged)
        tu.assign_non_tensor(data, update_lr_scheduler=True, global_token_num=[12] * 4, global_batch_size=8)
        if label == "inf":
            poison(worker)
        with on_the_cpu():
            output = seen.run(label, lambda data=data: trainer.training_client.train_batch(data=data))
        seen.metrics(label, tu.get(output, "metrics"))
        seen.state(label, engine.module, engine.optimizer)
    with on_the_cpu():
        seen.note("log-probs", infer(trainer.training_client.infer_batch, batch(0)))
    return seen.outcome()
