"""Readers of OAT's runs: written by the patches, and in one report with a run of verl."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from matplotlib.figure import Figure
from support.oat_modules import Args, precision
from support.report_runs import built, is_rebuilt_from, write_metrics

from verl_precision.errors import Refused
from verl_precision.facts.metrics import K3_KL, LOSS_SCALE, PROBS_DIFF, REWARD, SECONDS, SKIPPED
from verl_precision.report.catalog import ACCURACY, SERIES
from verl_precision.report.content import TWO_FRAMEWORKS, build_report, notes
from verl_precision.report.figures import draw
from verl_precision.report.readers import read
from verl_precision.report.render import NONE, config_by_label, page

ROUNDS = range(1, 8)


def logs(step: int, *, fp16: bool = True) -> dict[str, float]:
    """Return OAT's metrics of a round; round 4 overflowed in each update, so that the patches report no norm."""
    data = {"train/learning_round": float(step), "train/entropy": 0.5, "misc/lr": 1e-6, "misc/vram_allocated": 1.0}
    data |= {"actor/rewards": step / 8, "actor/response_tok_len": 100.0 + step}
    data |= {"train/rollout_k3_kl": 1e-7 * step, "train/rollout_probs_diff_mean": 1e-5}
    if fp16:
        skipped = 4.0 * (step == 4)
        data |= {"train/loss_scale": 1024.0, "train/skipped_steps": skipped, "train/overflow": skipped / 4}
    return data if fp16 and step == 4 else data | {"train/policy_grad_norm": 0.25}


FIRST = {ACCURACY: 0.125, "eval/average/score": 0.125, "misc/lr": 0.0}  # the evaluation before the first round


def written(out: Path, regime: str = "fp16", *, compute: torch.dtype | None = None, **more) -> Path:
    """Write a run's folder as a patched OAT does, with a stub of its engine; tests/conformance/oat uses real ones.

    Args:
        compute: the engine's dtype, if not the one that the regime names.
        more: further arguments of OAT's.
    """
    args = Args(precision=regime)
    sizes = {"rollout_batch_size": 64, "num_samples": 8, "train_batch_size": 128, "num_ppo_epochs": 1}
    others = {"seed": 1, "wb_run_name": f"dr_grpo-{regime}-seed1", "learning_rate": 1e-6, "max_epochs": math.inf}
    vars(args).update(sizes | others | more)
    precision.settle_precision(args)
    dtype = compute or precision.model_dtype(args.bf16, args.fp16)
    engine = SimpleNamespace(
        module=torch.nn.Linear(2, 2).to(dtype),
        optimizer=SimpleNamespace(param_groups=[{"params": [torch.zeros(6)]}], cur_scale=1024.0),
        communication_data_type=dtype,
        zero_optimization_stage=lambda: 2,
        get_data_types=lambda: (dtype, torch.float32),
        fp16_enabled=lambda: args.fp16,
    )
    folder = out / f"dr_grpo-{regime}-seed1_1122T03:00:00"
    folder.mkdir(parents=True)
    learner = SimpleNamespace(args=args, actors=[object()], save_path=str(folder), steps=0)
    learner.strategy, learner.model = SimpleNamespace(is_rank_0=lambda: True), SimpleNamespace(model=engine)
    precision.report_precision(learner)
    precision.write_metrics(learner, FIRST)
    for step in ROUNDS:
        learner.steps = step
        precision.write_metrics(learner, logs(step, fp16=args.fp16))
    closing = {name: value for name, value in logs(ROUNDS[-1]).items() if "scale" not in name and "skipped" not in name}
    precision.write_metrics(learner, closing | {ACCURACY: 0.625, "actor/total_time": math.nan})
    return folder


def test_patched_run_is_read_under_the_reports_names(tmp_path):
    folder = written(tmp_path)
    run = read("fp16", folder)
    assert list(run.steps) == list(ROUNDS), "not the evaluation before the first round"
    actor = {"actor/entropy": 0.5, "actor/grad_norm": 0.25, "actor/lr": 1e-6, LOSS_SCALE: 1024.0, SKIPPED: 0.0}
    assert run.steps[2] == actor | {REWARD: 0.25, "response_length/mean": 102.0, K3_KL: 2e-7, PROBS_DIFF: 1e-5}
    assert run.steps[4][SKIPPED] == 4.0 and "actor/grad_norm" not in run.steps[4]
    assert run.steps[7][ACCURACY] == 0.625 and run.steps[7][LOSS_SCALE] == 1024.0, "both lines of round 7"
    assert (run.regime, run.seed, run.source, run.framework, run.finished) == ("fp16", 1, "OAT", "OAT", None)
    dtypes = run.effective_dtypes
    assert dtypes["actor"]["compute"] == dtypes["rollout"]["rollout"] == "float16" and run.departure == ""
    assert run.notes == ("a step is a round of OAT's: 64 prompts of 8 answers, 4 updates",)
    assert run.config["learning_rate"] == 1e-6 and not {"seed", "wb_run_name", "save_path"} & run.config.keys()


@pytest.mark.parametrize(
    ("regime", "compute", "why"),
    [("bf16_train_fp16_infer", None, ""), ("fp16", torch.bfloat16, "its actor computed in bfloat16")],
)
def test_regime_is_the_settings_and_dtypes_are_the_engines(regime, compute, why, tmp_path):
    folder = written(tmp_path, regime, compute=compute)
    run = read("any-name", folder)
    assert run.regime == regime and run.departure == why
    with pytest.raises(Refused, match=f"is a run with PRECISION={regime}( that computed in bf16_.*)?; label it "):
        read("bf16", folder)
    for content, refusal in (("{}", "has no precision; it is not what a patched OAT writes"), ("{", "is not JSON")):
        (folder / "args.json").write_text(content)
        with pytest.raises(Refused, match=f"args.json: {refusal}"):
            read("fp16", folder)


def of_verl(out: Path) -> Path:
    """Write a file as verl's own file logger does."""
    data = {REWARD: 0.5, K3_KL: 2e-7, "actor/lr": 1e-6, SECONDS: 1.0}
    before = {"val-core/lighteval/MATH/reward/mean@1": 0.25}
    validated = before | {"val-core/gsm8k/acc/mean@1": 0.75, "val-core/gsm8k/acc/maj@4/mean": 1.0}
    steps = {0: before} | {step: data | (validated if step == 5 else {}) for step in range(1, 7)}
    return write_metrics(out / "seed1.jsonl", steps)


def test_verls_validation_is_an_accuracy_and_no_training_step(tmp_path):
    run = read("verl", of_verl(tmp_path))
    assert list(run.steps) == [1, 2, 3, 4, 5, 6] and run.framework == "verl"
    assert run.steps[5][ACCURACY] == 0.5, "the mean over its sets of data, as OAT's average is"
    assert [step for step in run.steps if ACCURACY in run.steps[step]] == [5]


def test_oat_and_verl_share_one_report(tmp_path):
    found = built([("oat-fp16", written(tmp_path / "oat")), ("verl", of_verl(tmp_path / "verl"))])
    oat, verl = found.entries
    assert found.common == (1, 2, 3, 4, 5, 6)
    assert (oat.outcomes["reward_last"], oat.outcomes["skipped_total"]) == (pytest.approx(0.5), 4.0)
    assert (oat.outcomes["accuracy_last"], verl.outcomes["accuracy_last"]) == (None, 0.5), "OAT's was in round 7"
    assert TWO_FRAMEWORKS in notes(found)
    assert "oat-fp16-seed1: a step is a round of OAT's: 64 prompts of 8 answers, 4 updates." in notes(found)
    axis = Figure().add_subplot()
    draw(found, next(of for of in SERIES if of.metric == ACCURACY), axis)
    single = [line.get_marker() for line in axis.lines if len(line.get_xdata()) == 1]
    assert single == [".", "."], "one evaluation has no line"
    assert "OAT: dr_grpo-fp16-seed1_1122T03:00:00" in page(found)
    assert is_rebuilt_from(tmp_path / "again", found)
    assert TWO_FRAMEWORKS not in notes(build_report([verl.run, verl.run], 0.95, ""))


def test_configurations_are_compared_within_a_framework(tmp_path):
    oat = [read("oat", written(tmp_path / str(rate), learning_rate=rate)) for rate in (1e-6, 2e-6)]
    verl = read("verl", of_verl(tmp_path / "verl"))
    verl = replace(verl, config={"data.train_batch_size": 16})
    assert build_report([oat[0], verl], 0.95, "").differs == {}
    found = build_report([*oat, verl], 0.95, "")
    assert found.differs == {"learning_rate": {"oat-seed1": "1e-06", "oat-seed1-2": "2e-06"}}
    assert config_by_label(found) == {"learning_rate": ["1e-06, 2e-06", NONE]}
