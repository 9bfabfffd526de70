"""The cases of SFT: by a release's separate SFT trainer, or on the model engine."""

import math
from types import SimpleNamespace

import harness
import torch
from harness import LEGACY, MODEL, OUT, PATCHED, RANK, VERL, batch, shared_folder
from hydra import compose, initialize_config_dir
from observations import inner_dtypes, local, name, same, spoil, state, watch
from tensordict import TensorDict
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoTokenizer


def sft() -> str:
    """Return the dtypes in which SFT trains under the same overlay."""
    return (legacy_sft if LEGACY else engine_sft)("+precision=fp16")


def composed_sft(file: str, *overrides: str):
    with initialize_config_dir(str(VERL / "trainer/config"), version_base=None):
        # 0.4.1 has no such key
        return compose(file, overrides=["++trainer.device=cpu", "trainer.total_training_steps=1", *overrides])


def legacy_sft_trainer(*overrides: str):
    from verl.trainer.fsdp_sft_trainer import FSDPSFTTrainer

    given = [
        f"model.partial_pretrain={MODEL}",
        f"model.strategy={harness.STRATEGY}",
        "model.enable_gradient_checkpointing=false",
        "data.train_batch_size=8",
        "data.micro_batch_size_per_gpu=2",
        f"trainer.default_local_dir={OUT}/sft",
    ]
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    ulysses = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "sp"))
    config = composed_sft("sft_trainer", *given, *overrides)
    data = [dict(row) for row in sft_batch(0)]
    return FSDPSFTTrainer(config, mesh, ulysses, AutoTokenizer.from_pretrained(MODEL), data, data)


def sft_batch(seed: int) -> TensorDict:
    return batch(seed).select(["input_ids", "attention_mask", "position_ids", "loss_mask"]).batch


def legacy_sft(*overrides: str) -> str:
    trainer = legacy_sft_trainer(*overrides)
    observed = watch(trainer.fsdp_model)
    trainer.training_step(sft_batch(0))
    return sft_facts(observed, vars(trainer).get("scaler"))


def sft_state(trainer) -> list[torch.Tensor]:
    return state(SimpleNamespace(module=trainer.fsdp_model, optimizer=trainer.optimizer))


def overflow_sft() -> str:
    """Put inf into one gradient of rank 1 and follow weights, Adam state, the scale, the LR and the metric.

    A patched tree's checkpoint must contain the scale; 0.4.1's has only the weights.
    """
    scaler = ["model.fsdp_config.grad_scaler.init_scale=1024"] if PATCHED else []
    trainer = legacy_sft_trainer("+precision=fp16", *scaler)
    trainer.training_step(sft_batch(0))
    backward = trainer._compute_loss_and_backward

    def poisoned(*args, **kwargs):
        loss = backward(*args, **kwargs)
        spoil(trainer.fsdp_model, math.inf)
        return loss

    before, lr = sft_state(trainer), trainer.optimizer.param_groups[0]["lr"]
    trainer._compute_loss_and_backward = poisoned
    metrics = trainer.training_step(sft_batch(1))
    scaler = vars(trainer).get("scaler")
    lost = PATCHED and hasattr(trainer, "checkpoint_manager") and saved_scaler(trainer) != scaler.state_dict()
    return ", ".join(
        [
            "skipped" if same(before, sft_state(trainer)) else "STEPPED",
            "no scale" if scaler is None else f"scale {scaler.get_scale():g}{' NOT SAVED' if lost else ''}",
            f"LR {'held' if trainer.optimizer.param_groups[0]['lr'] == lr else 'moves on'}",
            f"skipped_steps {metrics.get('train/skipped_steps')}",
        ]
    )


def lora_base_sft() -> str:
    """Train adapters by SFT's own trainer in regime fp16 over a frozen base in fp16."""
    trainer = legacy_sft_trainer("+precision=fp16", "model.lora_rank=4", "++model.fsdp_config.model_dtype=fp16")
    parts = ([], [])
    for parameter in trainer.fsdp_model.parameters():
        parts[parameter.requires_grad].append(local(parameter).detach())
    frozen, adapters = parts
    before = [[tensor.clone() for tensor in tensors] for tensors in parts]
    for seed in range(4):  # the first steps may overflow at the initial scale
        trainer.training_step(sft_batch(seed))
    adam = [entry["exp_avg"] for entry in trainer.optimizer.state.values()]
    kinds = {"base": frozen, "adapters": adapters, "Adam": adam}
    facts = [f"{kind} {', '.join(sorted({name(each.dtype) for each in kinds[kind]}))}" for kind in kinds]
    facts += ["base stays" if same(before[0], frozen) else "BASE MOVES"]
    facts += ["adapters move" if not same(before[1], adapters) else "ADAPTERS STAY"]
    return ", ".join(facts)


def saved_scaler(trainer) -> dict | None:
    """Return the state of the loss scaler in a checkpoint of the trainer's manager."""
    folder = shared_folder()
    trainer.checkpoint_manager.save_checkpoint(folder, global_step=1)
    return torch.load(f"{folder}/extra_state_world_size_2_rank_{RANK}.pt", weights_only=False)["grad_scaler"]


def engine_sft_trainer(*overrides: str):
    """Return the trainer with its configs built, without engine and data."""
    from verl.trainer.sft_trainer import SFTTrainer

    given = [f"model.path={MODEL}", "model.use_remove_padding=false", f"engine.strategy={harness.STRATEGY}"]
    trainer = object.__new__(SFTTrainer)
    trainer.config = composed_sft("sft_trainer_engine", *given, *overrides)
    trainer._build_config()
    return trainer


def engine_sft(*overrides: str) -> str:
    from engine_worker import infer

    trainer = engine_sft_trainer("engine.use_torch_compile=false", *overrides)
    trainer.engine_config.infer_micro_batch_size_per_gpu = 2
    trainer.engine_config.use_dynamic_bsz = False
    trainer.optimizer_config.total_training_steps = 1
    trainer._build_engine()
    trainer.training_client.reset()
    observed = watch(trainer.engine.module)
    infer(trainer.training_client.infer_batch, batch(0))
    return sft_facts(observed, trainer.engine.scaler)


def sft_facts(observed: dict[str, str], scaler) -> str:
    return f"{inner_dtypes(observed)}, {'scaler' if scaler is not None else 'no scaler'}"
