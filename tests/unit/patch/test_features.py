"""versions.toml lists exactly the features that each release's wheel has."""

import re
import zipfile

import pytest

from verl_precision.doctor.dtype_rules import rule_for
from verl_precision.doctor.tree import table_release
from verl_precision.patch.releases import VERL, load_releases
from verl_precision.patch.wheels import wheel
from verl_precision.paths import REPO

RELEASES = load_releases()


class Wheel:
    """The text of a release's wheel."""

    def __init__(self, release: str):
        with zipfile.ZipFile(wheel(release)) as archive:
            names = [name for name in archive.namelist() if name.endswith((".py", ".yaml"))]
            self.files = {name.removeprefix("verl/"): archive.read(name).decode() for name in names}

    def matches(self, path: str, pattern: str = "") -> bool:
        """Return whether a file, or one in a folder, exists and matches a regular expression."""
        return any(re.search(pattern, text, re.M) for name, text in self.files.items() if name.startswith(path))


def decides(release: str, hop: str, implementation: str) -> bool:
    return rule_for(hop, implementation, table_release(RELEASES[release], RELEASES)) is not None


FACTS = {
    "legacy_workers": lambda release, wheel: wheel.matches("workers/fsdp_workers.py"),
    "engine_critic": lambda release, wheel: (
        decides(release, "critic.compute", "engine") or wheel.matches("workers/engine/fsdp/engine_impl.py")
    ),
    "engine_critic_fails": lambda release, wheel: (
        wheel.matches("workers/roles/critic.py")
        and wheel.matches("workers/roles/critic.py", "FSDPCriticModelCfg|hf_config")
        and not wheel.matches("workers/engine/fsdp/engine_impl.py")
    ),
    "engine_policy": lambda release, wheel: wheel.matches("workers/engine_workers.py"),
    "engine_dtype": lambda release, wheel: wheel.matches("trainer/config/engine/fsdp.yaml", r"^dtype:"),
    "hf_rollout": lambda release, wheel: wheel.matches("workers/fsdp_workers.py", r"HFRollout\("),
    "sync_rollout": lambda release, wheel: decides(release, "rollout.weights", "vllm"),
    "server_engine_kwargs": lambda release, wheel: wheel.matches(
        "workers/rollout/vllm_rollout/vllm_async_server.py", "engine_kwargs"
    ),
    "sharding_manager": lambda release, wheel: wheel.matches("workers/fsdp_workers.py", "FSDPVLLMShardingManager"),
    "bfloat16_wire": lambda release, wheel: (
        wheel.matches("workers/engine/fsdp/", r"\.full_tensor\(\)\.to\(torch\.bfloat16, non_blocking=True\)")
        and not decides(release, "wire", "delta_sharded")
    ),
    "lora_adapter_path": lambda release, wheel: wheel.matches("trainer/config/", "^ *lora_adapter_path:"),
    "reward_worker": lambda release, wheel: wheel.matches("workers/fsdp_workers.py", r"^class RewardModelWorker\("),
    "reward_loop": lambda release, wheel: wheel.matches("trainer/config/", "^ *use_reward_loop:"),
    "sft_trainer": lambda release, wheel: wheel.matches("trainer/fsdp_sft_trainer.py"),
    "validate_config": lambda release, wheel: wheel.matches("utils/config.py", r"^def validate_config\("),
    "trainer_registry": lambda release, wheel: wheel.matches("trainer/", r"^def register_trainer\("),
    "platforms": lambda release, wheel: wheel.matches("plugin/platform/"),
    "bypass_mode": lambda release, wheel: wheel.matches(
        "trainer/ppo/rollout_corr_helper.py", r"with open_dict\(policy_loss_config\)"
    ),
}


def test_listed_features_match_the_wheels():
    listed = {feature: [name for name in RELEASES if RELEASES[name].has(feature)] for feature in VERL.features}
    wheels = {release: Wheel(release) for release in RELEASES}
    assert listed == {feature: [name for name in RELEASES if FACTS[feature](name, wheels[name])] for feature in FACTS}


@pytest.mark.parametrize("release", RELEASES)
def test_family_follows_from_the_features_and_dependencies_are_locks(release):
    entry = RELEASES[release]
    assert entry.family == ("C" if not entry.has("legacy_workers") else "B" if entry.has("engine_dtype") else "A")
    assert all((REPO / f"requirements/{name}.lock").exists() for name in entry.dependencies)
