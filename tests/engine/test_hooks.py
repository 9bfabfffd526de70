"""Hooks of every release that its workers do not run in the conformance suite: its trainers' methods, run by themselves
with stubs of the workers, and statements that must not be lost."""

import ast
import json
import os
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from unittest.mock import MagicMock

import hydra
import manifest
import pytest
import torch
from omegaconf import OmegaConf
from support.methods import function
from support.trees import patched_tree
from torch.distributed.tensor import DTensor
from torchdata.stateful_dataloader import StatefulDataLoader

from verl.trainer.ppo.utils import Role
from verl.utils import torch_functional
from verl_precision.patch.releases import OAT, VERL, Framework, load_releases

RELEASES, OATS = load_releases(), list(load_releases(framework=OAT))
ENGINE = [name for name, release in RELEASES.items() if release.family == "C"]
TRAINERS = {
    "ppo/ray_trainer.py": "RayPPOTrainer",
    "main_ppo_sync.py": "PPOTrainer",
    "v1/trainer_base.py": "PPOTrainer",
    "fully_async_trainer.py": "FullyAsyncTrainer",
}
SFT_TRAINER, HANDLER = ("fsdp_sft_trainer.py", "FSDPSFTTrainer"), ("checkpoint_handler.py", "CheckpointHandler")
# What methods that save and load checkpoints read of their modules.
NAMES = {"os": os, "torch": torch, "manifest": manifest, "Role": Role}
NAMES |= {name: MagicMock() for name in ("logging", "logger", "log_with_rank", "ray")}
SFT = [(name, *(SFT_TRAINER if name < "0.7.1" else HANDLER)) for name in RELEASES if name > "0.4.1"]


@pytest.fixture(scope="module")
def package(tmp_path_factory, pytestconfig) -> Callable[..., Path]:
    """``package(release, framework=VERL)``: the folder ``verl`` or ``oat`` of a patched tree."""

    @cache
    def of(release: str, framework: Framework = VERL) -> Path:
        given = pytestconfig.getoption(f"{framework.name}_tree")
        return patched_tree(release, tmp_path_factory.mktemp("tree"), given, framework) / framework.name

    return of


class Workers:
    """The workers of a role. Each save leaves one file."""

    def save_checkpoint(self, folder: str, *_: object, **__: object) -> None:
        Path(folder).mkdir(parents=True)
        (Path(folder) / "shard.pt").touch()

    def execute_func_rank_zero(self, remove: Callable[[], None]) -> None:
        remove()


def save_twice(file: Path, owner: str, root: Path, async_save: bool) -> None:
    """Save steps 1 and 2 by a trainer that keeps one checkpoint of its actor and all of its critic."""
    limits = {"max_actor_ckpt_to_keep": 1, "max_critic_ckpt_to_keep": None}
    config = OmegaConf.create({"trainer": {"default_local_dir": str(root), "default_hdfs_dir": None, **limits}})
    OmegaConf.update(config, "actor_rollout_ref.actor.checkpoint.async_save", async_save)
    save = function(file, f"{owner}._save_checkpoint", **NAMES)
    for step in (1, 2):
        trainer = MagicMock(config=config, global_steps=step, current_param_version=step, trainer_mode="sync")
        trainer.actor_rollout_wg = trainer.critic_wg = Workers()
        trainer.train_dataloader.state_dict.return_value = {}
        save(trainer)


@pytest.mark.parametrize("release", RELEASES)
def test_trainers_list_whole_checkpoints_and_remove_them_by_role(release, package, tmp_path):
    saved = {f"global_step_{step}/{role}/shard.pt" for step in (1, 2) for role in ("actor", "critic")}
    found = [(file, owner) for name, owner in TRAINERS.items() for file in package(release).rglob(name)]
    assert found
    for file, owner in found:
        for async_save in {False, release > "0.6.1"}:
            root = tmp_path / f"{file.stem}-{async_save}"
            save_twice(file, owner, root, async_save)
            if async_save:
                (root / manifest.TRACKER).write_text("2")  # as the workers do, once all is written
            last = root / "global_step_2"
            assert manifest.choose(root).folder == last, file
            left = {str(path.relative_to(root)) for path in root.rglob("shard.pt")}
            assert left == saved - (set() if async_save else {"global_step_1/actor/shard.pt"}), file
            if not async_save and (data := last / "data.pt").exists():
                data.unlink()
                assert manifest.fault(last) == "is torn: data.pt is missing", file


@pytest.mark.parametrize(("release", "name", "owner"), SFT)
def test_sft_lists_a_checkpoint_last_and_then_removes_the_previous(release, name, owner, package, tmp_path):
    (file,) = package(release).rglob(name)
    calls = MagicMock()
    calls.trainer.default_local_dir = calls.trainer.config.trainer.default_local_dir = str(tmp_path)
    calls.trainer.mode, calls.trainer.lora_train_meta = calls.OrchestrationMode.SPMD, None
    calls.trainer.rank = calls.trainer.device_mesh.get_rank.return_value = 0
    stubs = {each: getattr(calls, each) for each in ("torch", "manifest", "hdfs_io", "OrchestrationMode")}
    function(file, f"{owner}.save_checkpoint", os=os, json=json, **stubs)(calls.trainer, 1)
    order = [call for call, *_ in calls.mock_calls if call.startswith(("torch.", "manifest."))]
    order.remove("manifest.spare_previous")
    written = ["torch.save"] if owner == "FSDPSFTTrainer" else ["torch.save", "torch.distributed.barrier"]
    ends = ["manifest.finish", "manifest.remove_previous", "torch.distributed.barrier"]
    assert order == ["manifest.begin", *written, *ends]


def exhausted(epochs: int, file: Path) -> tuple[StatefulDataLoader, int]:
    """Write the state of a dataloader after its last batch; return a new one, and the number of batches so far."""
    saved, resumed = (StatefulDataLoader(list(range(6)), batch_size=2) for _ in range(2))
    for _ in range(epochs):
        batches = iter(saved)
        for _ in range(len(saved)):
            next(batches)
    file.parent.mkdir()
    torch.save(saved.state_dict(), file)
    return resumed, epochs * len(saved)


@pytest.mark.parametrize("release", ["0.8.0"])  # the only one with this trainer
def test_sync_trainer_that_resumes_between_epochs_trains_on_the_next(release, package, tmp_path):
    (file,) = package(release).rglob("main_ppo_sync.py")
    folder = tmp_path / "global_step_3"
    resumed, _ = exhausted(1, folder / "data.pt")
    trainer = MagicMock(train_dataloader=resumed)
    trainer.config.trainer.resume_mode, trainer.config.trainer.default_local_dir = "auto", str(tmp_path)
    find = {"find_latest_ckpt_path": lambda root: str(folder)}
    function(file, "PPOTrainer._load_checkpoint", **NAMES, **find)(trainer)
    assert len(list(resumed)) == 3


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("release", ENGINE)
def test_sft_that_resumes_between_epochs_trains_on_the_next(release, epochs, package, tmp_path):
    (file,) = package(release).rglob(HANDLER[0])
    resumed, steps = exhausted(epochs, tmp_path / "saved" / "data_0.pt")
    handler = MagicMock(train_dataloader=resumed, resume_global_step=steps, dp_rank=0)
    function(file, f"{HANDLER[1]}._load_dataloader_state", **NAMES)(handler, str(tmp_path / "saved"))
    assert len(list(resumed)) == 3


@pytest.mark.parametrize("key", ["actor.dtype", "actor.megatron.dtype"])
@pytest.mark.parametrize("release", ENGINE)
def test_ref_and_critic_follow_a_megatron_actor(release, key, package):
    with hydra.initialize_config_dir(str(package(release) / "trainer/config"), version_base=None):
        config = hydra.compose("ppo_trainer", ["model_engine=megatron", f"actor_rollout_ref.{key}=fp16"])
    key = key.removeprefix("actor.")
    roles = (config.actor_rollout_ref.actor, config.actor_rollout_ref.ref, config.critic)
    assert all(OmegaConf.select(role, key) == "fp16" for role in roles)
    unset = {"dtype": ("megatron.dtype", "bfloat16"), "megatron.dtype": ("dtype", None)}[key]
    assert all(OmegaConf.select(role, unset[0]) == unset[1] for role in roles)


@pytest.mark.parametrize(("name", "owner"), [("actor", "DataParallelPPOActor"), ("critic", "DataParallelPPOCritic")])
@pytest.mark.parametrize("release", [name for name in RELEASES if name not in ENGINE])
def test_gradients_are_clipped_at_the_configured_norm(release, name, owner, package):
    file = package(release) / f"workers/{name}/dp_{name}.py"
    worker = MagicMock()
    worker.config.grad_clip = 0.5
    worker.scaler.clip_and_step.side_effect = lambda optimizer, module, max_norm: max_norm
    assert function(file, f"{owner}._optimizer_step", torch=torch, DTensor=DTensor)(worker) == 0.5


# What an engine calls on its way to the merge of LoRA adapters, and after upstream's.
MERGES = ("log_gpu_memory_usage", "logger", "fsdp_version", "load_fsdp_model_to_gpu", "offload_fsdp_model_to_cpu")
MERGES += ("get_device_id", "merged_lora_context", "normalize_peft_param_name", "convert_weight_keys", "merged_weights")


@pytest.mark.parametrize("requested", [True, False])
@pytest.mark.parametrize("release", ENGINE)
def test_adapters_are_merged_outside_the_model_where_a_precision_is_requested(release, requested, package):
    """Upstream adds them to the weights of the base, in its 16 bits."""
    called = {name: MagicMock() for name in MERGES}
    engine = MagicMock(_qat_enabled=False)
    engine.precision.requested = requested
    file = package(release) / "workers/engine/fsdp/transformer_impl.py"
    weights, _ = function(file, "FSDPEngine.get_per_tensor_param", DTensor=DTensor, **called)(engine)
    assert (weights is called["merged_weights"].return_value) is requested


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
@pytest.mark.parametrize("release", ["0.7.0", "0.7.1", "0.8.0"])
def test_loss_of_a_batch_without_a_token_is_zero(release, mode, package):
    names = {"torch": torch, "verl_F": torch_functional}
    agg_loss = function(package(release) / "trainer/ppo/core_algos.py", "agg_loss", **names)
    assert agg_loss(torch.ones(2, 3), torch.zeros(2, 3), mode) == 0


@pytest.mark.parametrize("release", ENGINE)
def test_sft_by_ray_logs_a_step_that_was_skipped(release, package):
    """Such a step has no norm."""
    (file,) = package(release).rglob("sft_trainer_ray.py")
    first, last = (f"metrics['train/{name}'] = metrics.pop('{name}')" for name in ("loss", "mfu"))
    for loop in (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.For)):
        texts = [ast.unparse(each) for each in loop.body]
        if first in texts:
            renaming = loop.body[texts.index(first) : texts.index(last) + 1]
    metrics = {"loss": 2.0, "skipped_steps": 1.0, "loss_scale": 512.0, "lr": 0.0, "mfu": 0.5}
    renamed = {f"train/{name}": value for name, value in metrics.items()}
    exec(compile(ast.Module(renaming, []), str(file), "exec"), {"metrics": metrics})
    assert metrics == renamed


@pytest.mark.parametrize(
    ("framework", "release"),
    [*((VERL, name) for name in RELEASES), *((OAT, name) for name in OATS)],
    ids=lambda each: getattr(each, "name", each),
)
def test_imported_hooks_are_used(framework, release, package):
    modules = [f"{framework.name}.utils.{name}" for name in ("precision", "mismatch", "weight_sync")]
    for file in package(release, framework).rglob("*.py"):
        text = file.read_text()
        if not any(f"from {module} import " in text for module in modules):
            continue
        nodes = list(ast.walk(ast.parse(text)))
        imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module in modules]
        used = {node.id for node in nodes if isinstance(node, ast.Name)}
        assert {alias.name for node in imports for alias in node.names} <= used, file


UPSTREAMS_CAST = r"if not self\.precision\.requested:\s+self\.model = self\.model\.to\(torch_dtype\)"


@pytest.mark.parametrize("release", [name for name in RELEASES if name not in ENGINE])
def test_every_role_of_a_worker_has_its_hooks(release, package):
    """Checkpoints of trained models name the dtype of their export; adapters leave the buffers of their base, and keep
    their own dtype where a precision is requested."""
    for name in ("fsdp_workers.py", SFT_TRAINER[0]):
        for file in package(release).rglob(name):
            for node in ast.walk(ast.parse(text := file.read_text())):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "FSDPCheckpointManager":
                    given = {each.arg: ast.unparse(each.value) for each in node.keywords}
                    assert "export_dtype" in given or given["optimizer"] == "None", file
                if isinstance(node, ast.FunctionDef) and "get_peft_model(" in (body := ast.unparse(node)):
                    assert "cast_parameters(" in body or "cast_parameters" not in text, file
                    cast = re.sub(UPSTREAMS_CAST, "", body.partition("get_peft_model(")[2])
                    assert ".to(torch_dtype)" not in cast, file


def learning_statements(file: Path) -> set[str]:
    """Return the statements by which a learner of OAT weighs, measures the mismatch and reports the norm."""
    hooks = ("mb_pi = ", "mb_actor_logps = ", "reweigh(", "mismatch_metrics(", "largest_norm(")
    nodes = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Assign | ast.Expr)]
    return {text for text in map(ast.unparse, nodes) if any(hook in text for hook in hooks)}


@pytest.mark.parametrize("release", OATS)
def test_learners_of_oat_do_as_ppo_of_the_newest_release(release, package):
    """The conformance suite runs PPO of that release, and no multi-turn learner."""
    expected = learning_statements(package(OATS[-1], OAT) / "algorithms/ppo.py")
    assert len(expected) >= 6
    for file in package(release, OAT).glob("algorithms/ppo*.py"):
        assert learning_statements(file) == expected, file
    for file in package(release, OAT).rglob("*.py"):
        if "report_precision(self)" in (text := file.read_text()):
            assert "self._init(self.args, self.actors)\n        report_precision(self)\n" in text, file
