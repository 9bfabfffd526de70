"""The command ``plan-memory`` against measured peaks of real workers and the peaks that verl's project published."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from support.parsed_once import yaml_parsed_once
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

from verl_precision.bench.memory_model import TrainedModel
from verl_precision.bench.memory_plan import (
    GIB,
    OF_TRAINER,
    OUTSIDE_TENSORS,
    micro_batch,
    peak,
    plan_job,
    sequence_parallel,
)
from verl_precision.bench.model_shape import MODELS, ModelShape, model_config
from verl_precision.commands import plan_memory
from verl_precision.errors import Refused
from verl_precision.facts.compose import compose_config
from verl_precision.paths import REPO

MEASURED = REPO / "tests/expected/plan-memory-measured.json"
RECORDED = json.loads(MEASURED.read_text())
WITHIN = 0.15
CPU_LOSS = 12  # bytes per logit on a CPU: log_softmax, the zeros of gather's backward, the gradient added to them
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
LORA = "actor_rollout_ref.model.lora_rank=8"

# Of memory_worker.py: 2 ranks, 8 rows of 224 tokens in one micro-batch, and by "in_place" whether the loss's gradient
# overwrites the logits, as on a GPU.
USUAL = RECORDED["workers"][0]["setting"]
DENSE = USUAL["model"]
KINDS = {
    "qwen2": DENSE,
    "tied": DENSE | {"tie_word_embeddings": True},
    "qwen3": DENSE | {"model_type": "qwen3", "head_dim": 96, "num_key_value_heads": 2},
    "heads": {name: size for name, size in DENSE.items() if name != "num_key_value_heads"} | {"model_type": "llama"},
    "biased": DENSE | {"model_type": "llama", "attention_bias": True},
    "moe": DENSE
    | {"model_type": "qwen3_moe", "head_dim": 64, "num_key_value_heads": 2, "moe_intermediate_size": 256}
    | {"num_experts": 16, "num_experts_per_tok": 4},
}

# In the default suite: FSDP1; experts with checkpointing, and so few tokens that gathered weights outweigh activations.
QUICK = [row["setting"] for row in RECORDED["workers"][1:3]]


def planned(each: dict) -> TrainedModel:
    return TrainedModel(
        shape=ModelShape.of(each["model"], "it"),
        critic=each["role"] == "critic",
        shards=each["ranks"],
        tokens=each["micro_batch"] * each["length"],
        micro_batches=each["rows"] // each["micro_batch"],
        compute=each["dtype"],
        padded=each["in_place"],  # CPU_LOSS has all of the others
        **{name: each[name] for name in ("strategy", "checkpointing", "deferred", "base", "lora_rank")},
    )


@pytest.fixture(scope="module", autouse=True)
def parsed_once():
    with yaml_parsed_once():
        yield


def measured(run_ranks: Callable, settings: list[dict]) -> list[dict]:
    """Return the bytes of real workers in each setting, of the rank with the largest peak."""
    worker = Path(__file__).with_name("memory_worker.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(REPO / "scripts"))
        by_rank = run_ranks("patched", worker, "memory", json.dumps(settings), ranks=settings[0]["ranks"])
    return [max(results, key=lambda result: result["peak"]) for results in zip(*by_rank, strict=True)]


def assert_close(each: dict, result: dict) -> str:
    """Compare the plan of a setting with the measurement: weights and Adam within 1 %, peaks within 15 %.

    Returns:
        the moment of the peak.
    """
    plan = planned(each)
    moments = plan.update_moments()
    moments["loss"]["logits"] += 0 if each["in_place"] else plan.logit_bytes(CPU_LOSS) - plan.logit_bytes()
    moment, size = peak(moments)
    scoring = replace(plan, padded=False).scoring_moments(entropy=each["role"] == "actor")
    weights, adam = plan.resident["weights"], plan.resident["Adam"]
    scored = peak(scoring)[1] + weights + adam
    aside = 64 * len(each) * each["model"]["num_hidden_layers"]  # rotary frequencies, Adam's steps
    assert abs(result["parameters"] - weights) <= 0.01 * weights + aside
    assert abs(result["Adam"] - adam) <= 0.01 * adam + aside
    assert result["peak"] == pytest.approx(size, rel=WITHIN), (moment, each)
    assert result["scored"] == pytest.approx(scored, rel=WITHIN), each
    return moment


@pytest.mark.slow
@pytest.mark.subprocess
def test_workers_peak_at_the_planned_memory(run_ranks):
    for each, result in zip(QUICK, measured(run_ranks, QUICK), strict=True):
        assert_close(each, result)


@pytest.mark.slow
def test_workers_peak_at_the_planned_memory_in_every_setting(run_ranks, pytestconfig):
    """A setting to add is a row without ``measured`` in the recorded file; ``--write-results`` measures it."""
    rows = []
    for ranks in (2, 1):
        settings = [row["setting"] for row in RECORDED["workers"] if row["setting"]["ranks"] == ranks]
        results = measured(run_ranks, settings)
        rows += [{"setting": each, "measured": one} for each, one in zip(settings, results, strict=True)]
    if pytestconfig.getoption("--write-results"):
        MEASURED.write_text(json.dumps(RECORDED | {"workers": rows}, indent=1) + "\n")
    for row in rows:
        assert_close(row["setting"], row["measured"])


def test_recorded_workers_match_the_plan():
    moments = {assert_close(row["setting"], row["measured"]) for row in RECORDED["workers"]}
    assert moments == {"loss", "head", "layer", "step"}, "only the published PPO job peaks at the embedding"
    one_batch = planned(USUAL | {"deferred": True}).update_moments()
    assert one_batch == planned(USUAL).update_moments(), "one micro-batch defers nothing"


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_match_the_model(kind):
    with torch.device("meta"):
        config = AutoConfig.for_model(**KINDS[kind])
        model = AutoModelForCausalLM.from_config(config)
        critic = AutoModelForTokenClassification.from_config(AutoConfig.for_model(**KINDS[kind], num_labels=1))
    shape = ModelShape.of(KINDS[kind], kind)
    assert shape.total == sum(parameter.numel() for parameter in model.parameters())
    assert shape.block == sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    of_critic = planned(USUAL | {"model": KINDS[kind], "role": "critic"}).parameters
    assert of_critic == sum(parameter.numel() for parameter in critic.parameters())


def test_built_in_dimensions_match_the_model_cards():
    cards = {"Qwen/Qwen2.5-0.5B-Instruct": 0.49, "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": 1.78}  # 10^9 parameters
    cards |= {"Qwen/Qwen2.5-3B": 3.09, "Qwen/Qwen2.5-7B": 7.62, "Qwen/Qwen2.5-32B": 32.76}
    cards |= {"Qwen/Qwen3-8B": 8.19, "Qwen/Qwen3-30B-A3B": 30.53}
    shapes = {model: ModelShape.of(MODELS[model], model) for model in cards}
    assert {model: shape.total / 1e9 for model, shape in shapes.items()} == pytest.approx(cards, abs=0.005)
    assert shapes["Qwen/Qwen3-30B-A3B"].largest_tensor == 2 * 2048 * 768 * 128, "the experts"
    assert shapes["Qwen/Qwen2.5-7B"].largest_tensor == 152064 * 3584, "the embedding"


def training_peak(plan) -> int:
    """Return the peak of the training process's tensors: verl's ``perf/max_memory_allocated_gb``."""
    return max(sum(parts.get(part, 0) for part in OF_TRAINER) for parts in plan.moments.values())


@pytest.mark.parametrize("each", RECORDED["published"], ids=lambda each: each["job"])
def test_published_peaks_match_the_plan(each):
    (verl,) = importlib.util.find_spec("verl").submodule_search_locations
    config = compose_config(Path(verl) / "trainer/config", each["overrides"])
    plan = plan_job(config, 64 * GIB, each["length"])
    assert training_peak(plan) / GIB == pytest.approx(each["peak_gib"], rel=0.05)  # 15 % could hide a missing term


@pytest.mark.subprocess
def test_plans_are_printed_and_written(tmp_path, capsys):
    assert plan_memory.main(plan_memory.parse(["PRECISION=bf16", f"OUT={tmp_path / 'plan'}"])) == 0
    out = capsys.readouterr().out
    assert "dense_7b, grpo, bf16: Qwen/Qwen2.5-7B, 7.62 G parameters\n2 nodes of 8 GPUs of 80 GiB" in out
    assert "30.53 G parameters, 128 experts, 8 of them active\n4 nodes of 8 GPUs" in out
    assert out.count("fits into 80") == 3
    page = (tmp_path / "plan/plan-memory.md").read_text()
    assert "`make plan-memory PRECISION=bf16`" in page
    for experiment in plan_memory.EXPERIMENTS.split():
        assert f"\n## {experiment}, grpo, bf16\n" in page
    rollouts = [line.split() for line in page.splitlines() if line.startswith("rollout ")]
    assert len(rollouts) == 3 and rollouts[0] == ["rollout", "1.8", "3.5", "14.2", "41.8", "61.3", "*"]


def plan_one(*words: str):
    _, jobs, memory, length, _ = plan_memory.parse(words)
    (plan,) = plan_memory.plan_all(jobs, memory, length).values()
    return plan


@pytest.mark.subprocess
def test_plan_follows_the_configuration(monkeypatch):
    def changed(*overrides: str, **variables: str):
        words = {"EXPERIMENT": "dense_7b", "ARGS": " ".join(overrides), **variables}
        return plan_one(*(f"{name}={value}" for name, value in words.items()))

    usual = changed()
    assert usual.fits and not changed(MEMORY="24").fits
    halved = changed("trainer.nnodes=4")
    assert halved.moments["actor, step"]["Adam"] == usual.moments["actor, step"]["Adam"] // 2
    critic = changed(ALGO="ppo")
    assert critic.moments["rollout"]["Adam"] == pytest.approx(2 * usual.moments["rollout"]["Adam"], rel=0.1)
    full, padded = changed(PRECISION="fp32"), changed("actor_rollout_ref.model.use_remove_padding=false")
    assert full.moments["actor, loss"]["logits"] == 2 * padded.moments["actor, loss"]["logits"], "sdpa keeps padding"
    assert padded.moments["actor, loss"]["logits"] == 3 * usual.moments["actor, loss"]["logits"]
    assert full.moments["actor, loss"]["weights"] == usual.moments["actor, loss"]["weights"], "masters are fp32 in all"
    assert changed(PRECISION="bf16_train_fp16_infer").moments == usual.moments
    low = changed(f"{ACTOR}.dtype=null", f"{ACTOR}.fsdp_config.model_dtype=bf16").moments  # no request: upstream's rule
    assert low["actor, step"]["Adam"] == usual.moments["actor, step"]["Adam"] / 2
    monkeypatch.setattr(plan_memory, "validate", lambda *_, **__: None)  # it takes a process for LoRA
    lora = changed("actor_rollout_ref.model.lora_rank=32", f"++{ACTOR}.fsdp_config.model_dtype=fp16").moments
    for part, share in (("weights", 0.53), ("Adam", 0.02), ("gradients", 0.02)):
        assert 0 < lora["actor, step"][part] < share * usual.moments["actor, step"][part]
    adapted = (
        "actor_rollout_ref.model.lora_rank=32",
        f"{ACTOR}.fsdp_config.param_offload=true",
        f"{ACTOR}.strategy=fsdp",
    )
    for merged, sent, whole in (("false", 0, 4), ("true", 1, 0)):  # a base in fp32
        moments = changed(*adapted, f"actor_rollout_ref.model.lora.merge={merged}").moments
        assert moments["weights to the rollout"]["weights"] == sent * moments["actor, step"]["weights"]
        assert moments.get("weights to the host", {"gathered": 0})["gathered"] == whole * 7_615_616_512
    for offload, part, other in (("param_offload", "weights", "Adam"), ("optimizer_offload", "Adam", "weights")):
        gone = changed(f"{ACTOR}.fsdp_config.{offload}=true").moments
        assert (gone["rollout"][part], gone["rollout"][other]) == (0, usual.moments["rollout"][other])
        assert gone["actor, step"] == usual.moments["actor, step"], "it is loaded for the update"
    for strategy, sent in (("fsdp", usual.moments["rollout"]["weights"]), ("fsdp2", 0)):
        sending = changed(f"{ACTOR}.fsdp_config.param_offload=true", f"{ACTOR}.strategy={strategy}")
        assert sending.moments["weights to the rollout"]["weights"] == sent, "FSDP1 loads its shards to send them"
    old, unsynced = f"{ACTOR}.strategy=fsdp", f"{ACTOR}.fsdp_config.use_no_sync_for_gradient_accumulation=true"
    assert changed(old, unsynced).moments == changed(old).moments, "FSDP1 in fp16 synchronises every micro-batch"
    assert changed(old, unsynced, PRECISION="bf16").moments != changed(old, PRECISION="bf16").moments
    hybrid = changed(f"{ACTOR}.fsdp_config.fsdp_size=8")
    assert hybrid.moments["actor, step"]["Adam"] == 2 * usual.moments["actor, step"]["Adam"]
    for parallel, heads in ((2, 2), (8, 1)):  # of 4 heads of keys; a GPU has at least one
        of = changed(f"{ROLLOUT}.tensor_model_parallel_size={parallel}")
        assert of.cache_per_token == 2 * 28 * heads * 128 * 2
    assert changed(f"{ROLLOUT}.dtype=half").moments == usual.moments
    assert changed("actor_rollout_ref.model.target_modules=q_proj").moments == usual.moments, "there is no adapter"
    least = peak(usual.moments)[1] + OUTSIDE_TENSORS
    assert replace(usual, memory=least).fits and not replace(usual, memory=least - 1).fits
    short = changed(LENGTH="64")
    assert short.tokens < usual.tokens and training_peak(short) < training_peak(usual)
    scored = changed(f"{ROLLOUT}.log_prob_max_token_len_per_gpu=40960", f"{ROLLOUT}.temperature=0.6").moments
    assert scored["log-probabilities, head"]["logits"] == 4 * usual.moments["log-probabilities, head"]["logits"]
    assert scored["actor, loss"]["logits"] == 2 * usual.moments["actor, loss"]["logits"]
    other = changed("critic.model.path=Qwen/Qwen2.5-32B", ALGO="ppo")
    assert other.moments["critic, step"]["gradients"] > 4 * critic.moments["critic, step"]["gradients"]
    kept = changed("critic.model.enable_gradient_checkpointing=false", ALGO="ppo").moments
    assert kept["actor, loss"] == critic.moments["actor, loss"]
    assert kept["critic, loss"]["activations"] > 4 * critic.moments["critic, loss"]["activations"]
    few = changed("critic.ppo_mini_batch_size=1", ALGO="ppo").moments
    assert few["actor, loss"] == critic.moments["actor, loss"]
    assert few["critic, loss"]["activations"] < critic.moments["critic, loss"]["activations"]
    reference = changed(RECIPE="flowrl")
    assert "reference, head" in reference.moments and "reference, head" not in usual.moments


@pytest.mark.parametrize(
    ("mini_batch", "dynamic", "expected"),
    [(3, False, (200, 1)), (8, False, (200, 2)), (9, False, (200, 3)), (3, True, (200, 1)), (7, True, (256, 2))],
)
def test_answers_that_ranks_share_unevenly(mini_batch, dynamic, expected):
    job = {"trainer": {"nnodes": 1, "n_gpus_per_node": 2}}
    job["actor_rollout_ref"] = {"rollout": {"n": 1}, "actor": {"use_dynamic_bsz": dynamic}}
    assert micro_batch(OmegaConf.create(job), mini_batch, 256, 2, 100, parallel=1) == expected


@pytest.mark.parametrize(("older", "newer", "expected"), [(1, 1, 1), (1, 2, 2), (2, 1, 2), (4, 2, 4)])
def test_older_key_of_sequence_parallelism_wins_if_set(older, newer, expected):
    key = "ulysses_sequence_parallel_size"
    actor = {key: older, "fsdp_config": {key: newer}}
    assert sequence_parallel(OmegaConf.create({"actor_rollout_ref": {"actor": actor}})) == expected


def refusal(folder: Path, *words: str) -> str:
    """Return the line of a refusal, after which nothing is written."""
    with pytest.raises(Refused) as refused:
        plan_memory.main(plan_memory.parse([f"OUT={folder / 'plan'}", "EXPERIMENT=dense_7b", *words]))
    assert "\n" not in str(refused.value) and not (folder / "plan").exists()
    return str(refused.value)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("MODEL=Some/Model", "MODEL=Some/Model: give a folder with its config.json, or one of Qwen/"),
        ("ARGS=trainer.nodes=2", "ARGS=trainer.nodes=2: Could not override 'trainer.nodes'."),
        (f"ARGS={ROLLOUT}.dtype=banana", f"ARGS={ROLLOUT}.dtype=banana: {ROLLOUT}.dtype=banana is unknown to the"),
    ],
)
def test_bad_input_is_refused(word, message, tmp_path):
    assert refusal(tmp_path, word).startswith(message)


@pytest.mark.subprocess
@pytest.mark.parametrize(
    ("override", "message"),
    [
        (f"{LORA} actor_rollout_ref.model.target_modules=q_proj", "plan-memory supports all-linear"),
        (f"{LORA} actor_rollout_ref.model.exclude_modules=q_proj", "plan-memory supports None"),
        (f"{LORA} +actor_rollout_ref.model.target_parameters=w", "plan-memory supports None"),
        ("actor_rollout_ref.model.lora_adapter_path=/adapter", "plan-memory supports None"),
        ("critic.model.lora_rank=8", "plan-memory supports 0"),
        (f"{ACTOR}.strategy=megatron", "plan-memory supports fsdp or "),
        ("critic.fsdp.reshard_after_forward=False", "plan-memory supports True"),
        (f"{ROLLOUT}.gpu_memory_utilization=0.02", "1.6 GiB are too few for "),
        ("trainer.nnodes=0", "must be a whole number of at least 1"),
        ("trainer.nnodes=1.5", "must be a whole number of at least 1"),
        ("data.max_response_length=long", "must be a whole number of at least 1"),
        ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=many", "must be a whole number of at least 1"),
        ("actor_rollout_ref.rollout.gpu_memory_utilization=high", "must be a number above 0 and at most 1"),
        ("actor_rollout_ref.rollout.gpu_memory_utilization=7", "must be a number above 0 and at most 1"),
    ],
)
def test_job_that_cannot_be_planned_is_refused(override, message, tmp_path):
    assert refusal(tmp_path, "ALGO=ppo", f"ARGS={override}").startswith(
        f"{override.split()[-1].lstrip('+')}: {message}"
    )


@pytest.mark.subprocess
def test_unknown_model_is_refused_before_verl_is_imported(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    program = (
        "import sys\nfrom verl_precision.commands import plan_memory\nfrom verl_precision.errors import Refused\n"
        "try:\n    plan_memory.main(plan_memory.parse(sys.argv[1:]))\n"
    )
    program += "except Refused as refusal:\n    print(refusal, 'verl' in sys.modules)"
    line = [sys.executable, "-c", program, f"MODEL={tmp_path}"]
    environment = os.environ | {"PYTHONPATH": str(REPO / "scripts")}
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"MODEL={tmp_path}: its model_type is gpt2; ") and done.stdout.endswith(" False\n")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "its config.json is not JSON"),
        ({"model_type": "gpt2"}, "its model_type is gpt2; supported are llama, qwen2, qwen3, qwen3_moe"),
        ({"hidden_size": None}, "hidden_size is None; must be a whole number of at least 1"),
        ({"num_key_value_heads": "2"}, "num_key_value_heads is 2; must be a whole number of at least 1"),
        ({"mlp_only_layers": [0]}, "some of its layers have no experts; all layers must have the same structure"),
    ],
)
def test_unsupported_model_is_refused(config, message, tmp_path):
    (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(KINDS["moe"] | config))
    with pytest.raises(Refused, match=re.escape(f"MODEL={tmp_path}: {message}")):
        ModelShape.of(model_config(str(tmp_path)), str(tmp_path))
