"""Models that vLLM refuses in float16: the table read from its source, vLLM's own check, and commands that use it."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import probe
from lib.doctor.diagnosis import Diagnosis, diagnose
from lib.doctor.tree import identify_tree
from lib.errors import Refused
from lib.paths import REPO
from lib.probe.variants import check_vllm
from lib.run import vllm_float16
from lib.run.checks import check_rollout
from lib.run.job import compose, parse_job
from lib.run.vllm_float16 import Float16Support, float16_support

ROLLOUT, REWARD = "actor_rollout_ref.rollout", "reward.reward_model"
LISTED = '_FLOAT16_NOT_SUPPORTED_MODELS = {"gemma2": "Unstable.", "glm4": "Unstable."}\n'
# vLLM's own result for each model type; the last has a text model of another type.
VLLM = """
import json, torch
from transformers import AutoConfig, PaliGemmaConfig
from vllm.config.model import _FLOAT16_NOT_SUPPORTED_MODELS, _get_and_verify_dtype

def runs(config, dtype):
    try:
        return str(_get_and_verify_dtype("model", config, dtype, is_pooling_model=False))
    except ValueError as error:
        return str(error)

configs = [AutoConfig.for_model(each) for each in (*_FLOAT16_NOT_SUPPORTED_MODELS, "qwen2", "llama")]
configs.append(PaliGemmaConfig(text_config={"model_type": "gemma2"}))
for config in configs:
    config.dtype = torch.float16
print(json.dumps({config.model_type: [runs(config, dtype) for dtype in ("float16", "auto")] for config in configs}))
"""


def folder(path: Path, model_type: str | None, **content) -> Path:
    """A model's folder that contains only its config.json."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": model_type} | content))
    return path


def site(path: Path, table: str, file: str = "config/model.py") -> Path:
    """A site-packages with a vLLM whose source contains ``table``."""
    (path / "vllm" / file).parent.mkdir(parents=True)
    (path / "vllm/__init__.py").touch()
    (path / "vllm/_version.py").write_text("version: str\n__version__ = version = '0.9.1'\n")
    (path / "vllm" / file).write_text(f"import torch\n{table}")
    return path


def test_table_lists_the_models_that_the_installed_vllm_refuses(tmp_path):
    done = subprocess.run([sys.executable, "-c", VLLM], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout.splitlines()[-1])
    assert {"gemma2", "gemma3", "gemma3_text", "glm4"} <= set(outcomes) and outcomes["paligemma"][0] == "torch.float16"
    for model_type, (in_float16, auto) in outcomes.items():
        support = float16_support(str(folder(tmp_path / model_type, model_type)))
        assert support.supported == (in_float16 == "torch.float16")
        assert auto == ("torch.float16" if support.supported else "torch.bfloat16")
        if not support.supported:  # the same reason in vLLM's own words
            assert support.reason.partition(": ")[2] == in_float16.partition(" Reason: ")[2].rstrip(".")


@pytest.mark.parametrize("table", [LISTED, LISTED.replace(" =", ": dict[str, str] =")], ids=["plain", "annotated"])
@pytest.mark.parametrize("file", ["config.py", "config/__init__.py", "config/model.py"])
def test_table_is_read_from_each_layout_of_vllm(file, table, tmp_path):
    root = site(tmp_path / "site", table, file)
    refused = float16_support(str(folder(tmp_path / "glm", "glm4")), root)
    assert refused == Float16Support(False, "vLLM 0.9.1 refuses glm4 models in float16: Unstable")
    assert float16_support(str(folder(tmp_path / "qwen", "qwen2")), root).supported is True


@pytest.mark.parametrize("table", ["", LISTED.replace("_NOT", "_UN"), f"{LISTED[:-2]}, **more}}", f"{LISTED[:31]}x()"])
def test_support_is_unknown_without_the_table(table, tmp_path):
    support = float16_support(str(folder(tmp_path / "model", "gemma2")), site(tmp_path / "site", table))
    assert support.supported is None and "vLLM 0.9.1 has no _FLOAT16_NOT_SUPPORTED_MODELS" in support.reason


def test_support_is_unknown_without_a_config_or_vllm(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert "owner/name has no config.json" in float16_support("owner/name").reason
    assert "has no model_type" in float16_support(str(folder(tmp_path / "no-type", None))).reason
    model = str(folder(tmp_path / "gemma", "gemma2"))
    monkeypatch.setattr(vllm_float16.importlib.util, "find_spec", lambda name: None)
    assert float16_support(model, tmp_path) == Float16Support(None, "no vLLM is installed here")


@pytest.mark.parametrize(("variable", "place"), [("HF_HOME", "."), ("HF_HUB_CACHE", "hub")])
def test_hub_model_is_looked_up_in_the_local_cache(variable, place, tmp_path, monkeypatch):
    cached = tmp_path / "hub/models--google--gemma-2-2b"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs/main").write_text("abc123")
    (cached / "snapshots").mkdir()
    folder(cached / "snapshots/abc123", "gemma2")
    for name in ("HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path / place))
    assert float16_support("google/gemma-2-2b").supported is False


# --- the doctor -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gemma(tmp_path_factory) -> Path:
    return folder(tmp_path_factory.mktemp("models") / "gemma2", "gemma2", dtype="float16")


known = functools.cache(identify_tree)


def asked(trees: dict[str, Path], *words: str, state: str = "patched") -> Diagnosis:
    return diagnose(known(trees[state]), list(words))


def test_doctor_refuses_a_rollout_in_float16(trees, gemma):
    model = f"actor_rollout_ref.model.path={gemma}"
    for words in (["+precision=fp16"], ["+precision=bf16_train_fp16_infer"], [f"{ROLLOUT}.dtype=half"]):
        found = asked(trees, model, *words)
        assert found.verdict == "refused" and not found.sound
        assert "refuses gemma2 models in float16: Numerical instability" in found.sentence
        (finding,) = found.findings
        assert finding.key == f"{ROLLOUT}.dtype" and f"{ROLLOUT}.dtype=bfloat16" in finding.mend
    assert asked(trees, model, f"{ROLLOUT}.dtype=float16", state="pristine").verdict == "refused"
    extra = f"{ROLLOUT}.engine_kwargs.vllm.dtype"
    found = asked(trees, model, f"{ROLLOUT}.name=vllm", f"+{extra}=float16")
    assert [finding.key for finding in found.findings] == [extra]


def test_doctor_accepts_the_advised_dtypes_and_other_servers(trees, gemma):
    words = [f"actor_rollout_ref.model.path={gemma}", "+precision=fp16"]
    assert asked(trees, *words, f"{ROLLOUT}.dtype=bfloat16").verdict == "asked"
    assert asked(trees, *words, f"{ROLLOUT}.dtype=float32").verdict == "asked"
    assert asked(trees, *words, f"{ROLLOUT}.name=vllm", f"+{ROLLOUT}.engine_kwargs.vllm.dtype=bfloat16").sound is False
    assert asked(trees, words[0], "+precision=bf16").verdict == "agree"
    assert asked(trees, words[0], "+precision=fp32").verdict == "agree"
    assert asked(trees, *words, f"{ROLLOUT}.name=sglang").verdict == "agree"


def test_auto_is_not_the_models_float16_where_vllm_refuses_it(trees, gemma, tmp_path):
    words = ["+precision=fp16", f"{ROLLOUT}.dtype=auto", f"{ROLLOUT}.name=vllm"]
    found = asked(trees, *words, f"actor_rollout_ref.model.path={gemma}")
    assert found.hops["rollout.weights"].effective_dtype == "bfloat16" and found.verdict == "differ"
    qwen = folder(tmp_path / "qwen2", "qwen2", dtype="float16")
    assert asked(trees, *words, f"actor_rollout_ref.model.path={qwen}").verdict == "agree"


def test_doctor_checks_a_reward_models_server_too(trees, gemma):
    words = [f"{REWARD}.enable=true", f"{REWARD}.rollout.name=vllm", f"{REWARD}.model_path={gemma}"]
    found = asked(trees, *words, f"{REWARD}.rollout.dtype=float16")
    assert found.verdict == "refused" and [finding.key for finding in found.findings] == [f"{REWARD}.rollout.dtype"]
    assert "precision" not in found.findings[0].mend
    assert asked(trees, *words).verdict == "agree"
    assert asked(trees, *words[1:], f"{REWARD}.rollout.dtype=float16").verdict == "agree", "it is not enabled"


def test_doctor_reports_unknown_support(trees):
    found = asked(trees, "+precision=fp16", "actor_rollout_ref.model.path=owner/name")
    assert found.sound and found.sentence.endswith("is not known: owner/name has no config.json on this machine.")
    assert [finding.key for finding in found.findings] == ["actor_rollout_ref.model.path"]
    assert asked(trees, "+precision=bf16", "actor_rollout_ref.model.path=owner/name").findings == ()


# --- the commands -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["STEPS=3"], ["STEPS=3", "PRECISION=bf16_train_fp16_infer"]])
def test_run_is_refused_before_anything_starts(words, gemma, tmp_path):
    command = [sys.executable, REPO / "scripts/run.py", "DEVICE=cpu", f"MODEL={gemma}", f"OUT={tmp_path / 'out'}"]
    done = subprocess.run([*command, *words], capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"run: MODEL={gemma}: vLLM ")
    assert f"ARGS={ROLLOUT}.dtype=bfloat16" in done.stderr and "PRECISION=bf16" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [
        ["PRECISION=bf16"],
        ["PRECISION=fp32"],
        [f"ARGS={ROLLOUT}.dtype=bfloat16"],
        [f"ARGS={ROLLOUT}.name=sglang"],
        [f"ARGS=+{ROLLOUT}.engine_kwargs.vllm.dtype=bfloat16"],
    ],
)
def test_run_that_vllm_supports_is_not_refused(words, gemma, tmp_path):
    job = parse_job(["DEVICE=cpu", "STEPS=1", f"MODEL={gemma}", *words])
    check_rollout(job, compose(job, tmp_path))


def test_dtype_among_vllms_own_arguments_is_checked(gemma, tmp_path):
    args = f"ARGS=+{ROLLOUT}.engine_kwargs.vllm.dtype=half"
    job = parse_job(["DEVICE=cpu", f"MODEL={gemma}", "PRECISION=bf16", args])
    with pytest.raises(Refused, match=f"^MODEL={gemma}: vLLM .* refuses gemma2 models in float16"):
        check_rollout(job, compose(job, tmp_path))


def test_probe_by_vllm_is_refused_and_one_by_hf_reports_it(gemma, tmp_path, capsys):
    words = ["DEVICE=cpu", f"MODEL={gemma}", f"DATA={tmp_path / 'data.parquet'}", f"OUT={tmp_path / 'out'}"]
    (tmp_path / "data.parquet").write_bytes(b"PAR1")
    with pytest.raises(Refused, match="leave out bf16_train_fp16_infer and fp16: PRECISION='bf16 fp32'"):
        probe.main([*words, "BACKEND=vllm"])
    check_vllm(probe.parse([*words, "BACKEND=vllm", "PRECISION=bf16 fp32"]))
    assert capsys.readouterr().out == ""
    check_vllm(probe.parse([*words, "BACKEND=hf"]))
    assert "bf16_train_fp16_infer and fp16 are measured here" in capsys.readouterr().out
