"""``make verify-gpu``: its words, its steps' results, the record that it resumes from, and the report."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import gpu_state as state
from support.report_runs import write_metrics
from support.trees import RELEASE, edit, patched_tree

from verl_precision.commands import verify_gpu
from verl_precision.errors import Refused
from verl_precision.facts.gpus import Gpu
from verl_precision.facts.metrics import PROBS_DIFF, REWARD, SECONDS
from verl_precision.files import write_json
from verl_precision.patch.releases import VERL, find_release
from verl_precision.patch.stack import release_stacks
from verl_precision.paths import REPO
from verl_precision.verify import long_model
from verl_precision.verify.report import Verification, device_name, markdown, versions, write
from verl_precision.verify.steps import STAGES, STEPS, Step, VerifiedDevice, outcomes, trained

SLEEP = "import time; time.sleep(600)"
FAIL = "print('first line'); raise SystemExit('the cause')"
WRITE = (
    "import sys, pathlib; pathlib.Path(sys.argv[1], 'a.png').touch(); pathlib.Path(sys.argv[1], 'v').write_text('7')"
)


def step(code: str, *needs: str, name: str = "toy", bf16: bool = False, limit_s: float = 60.0) -> Step:
    """Return a step of the stage "cost" that runs ``code`` with its folder as argument."""

    def commands(target: VerifiedDevice, out: Path) -> list:
        return [[sys.executable, "-c", code, out]]

    def values(out: Path) -> dict:
        return {"report": f"# Title\n\n## Sizes\n\n{(out / 'v').read_text()}\n\n![gone](a.png)\n"}

    return Step("cost", name, needs, commands, values, bf16, limit_s)


@pytest.mark.parametrize(
    ("made", "status", "reason"),
    [
        (step(WRITE), "passed", None),
        (step(WRITE, "torch", "no_such_module"), "skipped", "not installed: no_such_module"),
        (step(f"{WRITE}; exit(3)", limit_s=61.0), "failed", "exit code 3; toy.log"),
        (step("pass"), "failed", "FileNotFoundError: .*; toy.log"),
        (step(FAIL), "failed", "exit code 1; toy.log\nfirst line\nthe cause"),
        (step(SLEEP, limit_s=0.05), "failed", "did not end within 0.5 s; toy.log"),
    ],
)
def test_result_of_a_step_has_its_reason(made, status, reason, tmp_path):
    result = made.run(VerifiedDevice("cpu", tmp_path))
    assert result["status"] == status and ("values" in result) == (made.limit_s == 61.0 or status == "passed")
    assert ("reason" in result) == (reason is not None)
    assert reason is None or re.fullmatch(reason, result["reason"])
    assert status != "failed" or Path(result["files"][-1]).name == "toy.log"


def test_step_in_bf16_is_skipped_on_a_gpu_without(tmp_path, monkeypatch):
    for bf16 in (True, False):
        monkeypatch.setattr(
            "verl_precision.verify.steps.find_gpus", lambda bf16=bf16: (Gpu("a GPU", (7, 5), bf16, True),)
        )
        assert step(WRITE, bf16=True).run(VerifiedDevice("cuda", tmp_path))["status"] == (
            "passed" if bf16 else "skipped"
        )


def test_record_resumes_under_the_same_versions_and_the_report_has_all_steps(tmp_path, monkeypatch):
    made = Verification.open(tmp_path, "NVIDIA H200 (80%)")
    assert made.file.name == "nvidia-h200-80.json"
    training = next(each for each in STEPS if each.name == "training")
    made.add(training, step(WRITE).run(VerifiedDevice("cpu", tmp_path / "work")))
    made.add(STEPS[0], {"status": "failed", "reason": "no | driver\nat all"})
    again = Verification.open(tmp_path, made.content["name"])
    assert again.passed(training) and not again.passed(STEPS[0]) and not again.passed(STEPS[-1])
    text = write(again).read_text()
    assert "1 passed, 1 failed, " in text and "no \\| driver<br>at all" in text
    assert "\n## Cost\n\n### training\n\n#### Sizes\n\n7\n" in text and "gone" not in text
    assert text.rstrip().endswith("![training](nvidia-h200-80-a.png)") and (tmp_path / "nvidia-h200-80-a.png").exists()
    monkeypatch.setattr("verl_precision.verify.report.versions", lambda: {"torch": "another"})
    assert not Verification.open(tmp_path, made.content["name"]).passed(training), "other versions begin anew"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["ONLY=nmuerics"], "ONLY=nmuerics: must be one of machine, numerics, job, "),
        (["ONLY=cost probes"], "ONLY=probes: must be one of machine"),
        (["DEVICE=tpu"], "DEVICE=tpu: must be one of cpu, cuda"),
        (["SIZE=1"], "SIZE: is not a variable"),
    ],
)
def test_bad_words_are_refused(words, named):
    with pytest.raises(Refused) as refusal:
        verify_gpu.parse(words)
    assert str(refusal.value).startswith(named)


def test_only_names_stages_and_steps(tmp_path):
    steps, out, target = verify_gpu.parse(["DEVICE=cpu", "ONLY=machine sanity-bf16", f"OUT={tmp_path}"])
    assert [step.name for step in steps] == ["hardware", "doctor", "sanity-bf16"] and out == tmp_path and target.small
    assert verify_gpu.parse(["DEVICE=cpu"])[:2] == ([], verify_gpu.VERIFIED), "a CPU is not reported in docs"
    assert {step.stage for step in STEPS} == set(STAGES) and len({step.name for step in STEPS}) == len(STEPS)


def test_a_failed_steps_log_goes_when_it_passes(tmp_path):
    made, training = Verification.open(tmp_path, "CPU"), next(each for each in STEPS if each.name == "training")
    for code, left in ((FAIL, ["cpu-toy.log"]), (WRITE, ["cpu-a.png"])):
        made.add(training, step(code).run(VerifiedDevice("cpu", tmp_path / "work")))
        assert made.content["steps"]["training"]["files"] == left
        assert [file.name for file in tmp_path.iterdir() if file.suffix in (".log", ".png")] == left
    assert "![training](cpu-a.png)" in markdown(made)


def test_gpu_is_the_one_that_torch_sees(monkeypatch):
    monkeypatch.setattr("verl_precision.verify.report.find_gpus", lambda: (Gpu("GPU 1", (9, 0), True, True),))
    assert device_name("cuda") == "GPU 1" and device_name("cpu") == "CPU"
    monkeypatch.setattr("verl_precision.verify.report.find_gpus", lambda: ())
    with pytest.raises(Refused, match="^DEVICE=cuda: the torch of this Python finds no GPU; check CUDA_VISIBLE"):
        device_name("cuda")


def test_exit_code_is_that_of_all_steps(tmp_path, monkeypatch, capsys):
    names = [each.name for each in STEPS[:2]]
    words = ["DEVICE=cpu", f"ONLY={' '.join(names)}", f"OUT={tmp_path / 'out'}", f"WORK={tmp_path / 'work'}"]
    for codes, expected in (((WRITE, FAIL), 1), ((WRITE, WRITE), 0), ((None, WRITE), 0), ((None, None), 1)):
        needs = [() if code else ("no_such_module",) for code in codes]
        toys = tuple(step(code or "", *of, name=name) for code, of, name in zip(codes, needs, names, strict=True))
        monkeypatch.setattr(verify_gpu, "STEPS", toys)
        assert verify_gpu.main(verify_gpu.parse(words)) == expected, codes
    printed = capsys.readouterr().out
    assert "1/2 cost, hardware … passed in 0:00" in printed and "skipped: not installed: no_such_module" in printed


def test_state_of_gpus_is_that_of_the_reports(tmp_path):
    """`make matrix` writes these pages."""
    assert {str(page): page.read_text() for page in state.pages()} == {str(a): b for a, b in state.pages().items()}
    (tmp_path / "t4.json").write_text(json.dumps({"name": "Tesla T4", "steps": {"training": {"status": "passed"}}}))
    text = state.sentence(tmp_path.parent / "README.md", tmp_path)
    results = "machine, numerics, job, probe, amp not run; cost: 1 of 2 passed, 1 not run"
    assert text == f"[Tesla T4]({tmp_path.name}/t4.md): {results}"


def test_jobs_are_tabled(tmp_path):
    record, data = Verification.open(tmp_path, "CPU"), {}
    for step, (seconds, diff) in enumerate([(90.0, 0.5), (70.0, 3e-3), (4.0, 3e-3), (2.0, 3e-3), (3.0, 3e-3)], 1):
        data[step] = {REWARD: 0.5, SECONDS: seconds, PROBS_DIFF: diff, "response_length/mean": 20.0 + step}
        data[step]["actor/perf/max_memory_allocated_gb"] = 7.5 - step
    write_metrics(tmp_path / "run/metrics.jsonl", data)
    summary = {"k3_kl": 0.5, "k3_kl_median": 2e-5, "reward_first": 0.25, "reward_last": 0.75, "effective_dtypes": {}}
    write_json(tmp_path / "run/summary.json", summary | {"skipped_steps": 1, "loss_scale": 64.0})
    for each in (each for each in STEPS if each.stage == "job"):
        record.add(each, {"status": "passed", "seconds": 61.0, "values": trained(tmp_path)})
    text = markdown(record)
    assert "| sanity | bf16 | 3.00 | 2.0e-05 | 3.0e-03 | 23 | 0.250 | 0.750 | 6.5 | 1 | 64 |" in text
    assert text.count("| 1:01 |") == 8 and "| long1024 | bf16_train_fp16_infer | 3.00 |" in text


def test_outcomes_of_tests_are_those_of_junit(tmp_path):
    ends = {"a": "", "b": "<skipped/>", "c": "<failure/>", "d": "<error/>"}
    cases = "".join(f'<testcase name="{name}">{end}</testcase>' for name, end in ends.items())
    (tmp_path / "junit.xml").write_text(f"<testsuite>{cases}</testsuite>")
    found = outcomes(tmp_path)["tests"]
    assert [each["outcome"] for each in found.values()] == ["passed", "skipped", "failure", "error"]


@pytest.mark.slow
@pytest.mark.subprocess
def test_engine_step_tests_the_installed_tree_of_either_series(tmp_path):
    (tmp_path / "installed").mkdir()
    tree = patched_tree(RELEASE, tmp_path / "installed", None, fixes=False)
    edit(
        tree / "verl/workers/engine/fsdp/transformer_impl.py",
        "import",
        "raise RuntimeError('of the installed tree')\nimport",
    )
    words = ["-q", "-p", "no:xdist", "-p", "no:cacheprovider", f"--verl-tree={tree}", f"--basetemp={tmp_path / 'tmp'}"]
    command = [sys.executable, "-m", "pytest", *words, "tests/engine/test_on_device.py", "-k", "hop and fsdp2"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert done.returncode and "of the installed tree" in done.stdout + done.stderr


def test_stack_of_a_record_is_that_of_the_installed_verl(tmp_path, monkeypatch):
    tree = patched_tree(RELEASE, tmp_path, None, fixes=False)
    monkeypatch.setattr("verl_precision.verify.report.package_folder", lambda name: tree / name)
    assert versions()["stack"] == release_stacks(find_release(RELEASE))[0].id
    (tree / VERL.stamp).unlink()
    assert versions()["stack"] == "none"


def test_wide_model_answers_as_long_as_asked(tmp_path, monkeypatch):
    monkeypatch.setitem(long_model.WIDE, "intermediate_size", 8)
    long_model.main("1024", str(tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["hidden_size"], len(config["layer_types"]), config["max_position_embeddings"]) == (768, 12, 1040)
    assert (tmp_path / "tokenizer.json").exists()
