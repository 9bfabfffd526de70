"""A whole job of a patched verl with no precision requested is the unpatched one's: metrics, checkpoints, output.

PPO with a critic and a reference, one greedy answer a step, so that the job repeats itself bitwise: verl draws a new
value head for each job and collects the answers of a batch in any order. The job saves a checkpoint after two steps,
and another job resumes from it.

``pytest -m slow tests/e2e/test_unrequested.py --write-results``
"""

import hashlib
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import leaves
from omegaconf import OmegaConf
from release_jobs import overrides, prepare_task, record, run_job
from transformers import AutoModelForTokenClassification

from verl_precision.patch.apply import apply
from verl_precision.patch.releases import find_release
from verl_precision.patch.stack import release_stacks
from verl_precision.patch.wheels import unpacked_wheel

RELEASES = ["0.9.1", "0.8.0", "0.7.1"]  # one of each trainer that vLLM's CPU build serves
MICRO_BATCHES = (
    *("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", "critic.ppo_micro_batch_size_per_gpu"),
    *(f"actor_rollout_ref.{role}.log_prob_micro_batch_size_per_gpu" for role in ("ref", "rollout")),
)
REPEATABLE = [
    "+algo=ppo",
    "data.train_batch_size=1",
    "actor_rollout_ref.actor.ppo_mini_batch_size=1",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.rollout.n=1",
    "actor_rollout_ref.rollout.top_k=1",
    "actor_rollout_ref.rollout.max_num_seqs=1",
    "actor_rollout_ref.rollout.enable_prefix_caching=false",
    "critic.ppo_mini_batch_size=1",
    *(f"{key}=1" for key in MICRO_BATCHES),
]
# Keys that the patches add to verl's configuration, dtype beneath a role.
ADDED = re.compile(
    r"/(grad_scaler/\w+|keep_fp32_modules(/\d+)?|report_dtypes|check_weight_sync|check_rewards|mismatch_freq)$"
    r"|^/(actor_rollout_ref/)?(actor|ref|critic|reward_model)/dtype$"
)
MEASURED = re.compile("timing|perf/|throughput|mfu|memory")  # metrics that two jobs of one tree disagree on
PREFIX = re.compile(r"\x1b\[[0-9;]*m|\(\w+ pid=[^)]*\)")  # Ray's, of a line of another process
DUMPED = re.compile(r"^\s*\{?$|^\s*\{?'|\}$")  # the printed configuration, which is compared as a file
WORDS = re.compile(r"[A-Za-z]{2,}\W+[A-Za-z]{2,}")  # a printed configuration is sometimes cut within a value
# Progress bars, the console's line of metrics, what vLLM prints where Ray ends its server first, and the throughput
# that TransferQueue prints in a job that takes minutes.
MOVING = re.compile(r"\d+%\||timing|perf/|\[shutdown\]|\[Performance\]|Time range: last|Per-operation statistics")
VARYING = re.compile(r"\S*/\S*|0x[0-9a-f]+|\b[0-9a-f]{8,}\b|[0-9]+([.:-][0-9]+)*")


@pytest.mark.slow
@pytest.mark.parametrize("release", RELEASES)
def test_job_without_a_request_is_upstreams(release, tmp_path, pytestconfig):
    task, seen = prepare_task(), {}
    make_critic(task, task / "critic")
    for name in ("upstream", "patched"):
        tree, out = unpacked_wheel(release, tmp_path / name / "tree"), tmp_path / name / "out"
        out.mkdir()
        if name == "patched":
            apply(tree, fixes=False)
        seen[name] = [observed(release, tree, task, out, steps) for steps in (2, 3)]  # the second resumes
    for upstream, patched in zip(seen["upstream"], seen["patched"], strict=True):
        assert {kind: differences(upstream[kind], patched[kind]) for kind in upstream} == dict.fromkeys(upstream, {})
        assert all(upstream.values())
    if pytestconfig.getoption("write_results"):
        counts = {kind: len(parts) for kind, parts in seen["patched"][1].items()}
        stack, _ = release_stacks(find_release(release))
        record(release, {"unrequested": {"stack": stack.id, **counts}})


def observed(release: str, tree: Path, task: Path, out: Path, steps: int) -> dict[str, dict[str, Any]]:
    """Run a job and return its metrics, the digests of its files, its configuration and its lines, each by name."""
    groups = [*REPEATABLE, f"critic.model.path={task / 'critic'}"]
    groups += ["~critic.fsdp"] * find_release(release).has("legacy_workers")  # configs/device has it for later ones
    metrics, lines = run_job(release, tree, overrides(release, task, out, steps, groups), out, str(steps))
    folder = out / f"checkpoints/global_step_{steps}"
    config = OmegaConf.to_container(OmegaConf.load(out / ".hydra/config.yaml"), resolve=True)
    return {
        "metrics": {tag: repr(values) for tag, values in metrics.items() if not MEASURED.search(tag)},
        "files": {str(file.relative_to(folder)): digest(file, out) for file in folder.rglob("*") if file.is_file()},
        "config": {key: str(value).replace(str(out), "OUT") for key, value in leaves(config) if not ADDED.search(key)},
        "lines": dict.fromkeys(filter(None, map(normal, lines)), "printed"),
    }


def normal(line: str) -> str | None:
    """Return a line without what differs between two jobs, None if the line is ignored."""
    text = PREFIX.sub("", line)
    if DUMPED.search(text) or MOVING.search(text) or not WORDS.search(text):
        return None
    return VARYING.sub("N", text).strip()


def make_critic(task: Path, folder: Path) -> Path:
    """Return the task's model with a value head, whose weights are drawn once."""
    torch.manual_seed(0)
    AutoModelForTokenClassification.from_pretrained(task / "model", num_labels=1).save_pretrained(folder)
    for file in (task / "model").glob("*token*"):
        shutil.copy(file, folder)
    return folder


def digest(file: Path, out: Path) -> str:
    """Return the hash of what a file of a checkpoint contains, without the folder of the job and states of RNGs, which
    verl does not seed."""
    if file.suffix != ".pt":
        return hashlib.sha256(file.read_bytes().replace(str(out).encode(), b"OUT")).hexdigest()
    whole = hashlib.sha256()
    for path, value in leaves(torch.load(file, weights_only=False)):
        if path.startswith("/rng"):
            value = type(value)
        if hasattr(value, "to_local"):
            value = value.to_local()
        bits = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if torch.is_tensor(value) else b""
        whole.update(f"{path} {type(value)} {'' if bits else value}".encode() + bits)
    return whole.hexdigest()


def differences(upstream: Mapping[str, Any], patched: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    keys = sorted(upstream.keys() | patched.keys())
    return {key: (upstream.get(key), patched.get(key)) for key in keys if upstream.get(key) != patched.get(key)}
