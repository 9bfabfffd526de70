"""Models that vLLM refuses in float16: the table read from its source, vLLM's own check, and commands that use it."""

import json
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from verl_precision.commands import probe, run
from verl_precision.doctor.diagnosis import SOUND, diagnose
from verl_precision.doctor.tree import Tree, identify_tree
from verl_precision.errors import Refused
from verl_precision.facts import vllm_float16
from verl_precision.facts.vllm_float16 import POOLING_HEADS, Float16Support, float16_support
from verl_precision.files import write
from verl_precision.probe.log_probs import check_regimes
from verl_precision.run.checks import check_rollout
from verl_precision.run.job import compose, parse_job

ROLLOUT, REWARD = "actor_rollout_ref.rollout", "reward.reward_model"
LISTED = '_FLOAT16_NOT_SUPPORTED_MODELS = {"gemma2": "Unstable.", "glm4": "Unstable."}\n'
# vLLM's own result for each model type of transformers; the last has a text model of another type.
VLLM = """
import json, sys, torch
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from vllm.config.model import _FLOAT16_NOT_SUPPORTED_MODELS, _get_and_verify_dtype

def runs(config):
    try:
        return str(_get_and_verify_dtype("model", config, "float16", is_pooling_model=False))
    except ValueError as error:
        return str(error)

configs = []
for name in {*CONFIG_MAPPING, *_FLOAT16_NOT_SUPPORTED_MODELS}:
    try:
        configs.append(AutoConfig.for_model(name, dtype=torch.float16))
    except Exception:  # of a config without defaults, as that of an encoder with a decoder
        print(name, file=sys.stderr)
configs.append(AutoConfig.for_model("paligemma", dtype=torch.float16, text_config={"model_type": "gemma2"}))
print(json.dumps({config.model_type: runs(config) for config in configs}))
"""


def folder(path: Path, model_type: str | None, **content) -> Path:
    """Make a model's folder that contains only its config.json."""
    write(path / "config.json", json.dumps({"model_type": model_type} | content).encode())
    return path


def site(path: Path, table: str, file: str = "config/model.py") -> Path:
    """Make a site-packages with a vLLM whose source contains ``table``."""
    write(path / "vllm" / file, f"import torch\n{table}".encode())
    write(path / "vllm/_version.py", b"version: str\n__version__ = version = '0.9.1'\n")
    (path / "vllm/__init__.py").touch()
    return path


@pytest.mark.slow
@pytest.mark.subprocess
def test_table_lists_the_models_that_the_installed_vllm_refuses(tmp_path):
    done = subprocess.run([sys.executable, "-c", VLLM], capture_output=True, text=True, cwd=tmp_path, check=True)
    outcomes = json.loads(done.stdout.splitlines()[-1])
    refused = {model_type for model_type, outcome in outcomes.items() if outcome != "torch.float16"}
    assert {"gemma2", "gemma3", "gemma3_text", "glm4"} == refused and len(outcomes) > 300
    for model_type, outcome in outcomes.items():
        support = float16_support(str(folder(tmp_path / model_type, model_type)))
        assert support.supported == (outcome == "torch.float16")
        if not support.supported:  # the same reason in vLLM's own words
            assert support.reason.partition(": ")[2] == outcome.partition(" Reason: ")[2].rstrip(".")


@pytest.mark.parametrize("file", ["config.py", "config/__init__.py", "config/model.py"])
def test_table_is_read_from_each_layout_of_vllm(file, tmp_path):
    for form in (" =", ": dict[str, str] ="):
        root = site(tmp_path / form, LISTED.replace(" =", form), file)
        refused = float16_support(str(folder(tmp_path / "glm", "glm4")), root)
        assert refused == Float16Support(False, "vLLM 0.9.1 refuses glm4 models in float16: Unstable")
        assert float16_support(str(folder(tmp_path / "qwen", "qwen2")), root).supported is True


def test_support_is_unknown_without_the_table_a_config_or_vllm(tmp_path, monkeypatch):
    for table in ("", f"{LISTED[:-2]}, **more}}", f"{LISTED[:31]}x()"):
        support = float16_support(str(folder(tmp_path, "gemma2")), site(tmp_path / str(len(table)), table))
        assert support.supported is None and "vLLM 0.9.1 has no _FLOAT16_NOT_SUPPORTED_MODELS" in support.reason
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert "owner/name has no config.json" in float16_support("owner/name").reason
    assert "has no model_type" in float16_support(str(folder(tmp_path, None))).reason
    monkeypatch.setattr(vllm_float16, "package_folder", lambda name, site: None)
    unknown = Float16Support(None, "no vLLM is installed here")
    assert float16_support(str(folder(tmp_path, "gemma2")), tmp_path) == unknown


def test_hub_model_is_looked_up_in_the_local_cache(tmp_path, monkeypatch):
    cached = tmp_path / "hub/models--google--gemma-2-2b"
    write(cached / "refs/main", b"abc123")
    folder(cached / "snapshots/abc123", "gemma2")
    for home, cache in ((tmp_path, ""), ("/none", tmp_path / "hub")):
        monkeypatch.setenv("HF_HOME", str(home))
        monkeypatch.setenv("HF_HUB_CACHE", str(cache))
        assert float16_support("google/gemma-2-2b").supported is False


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A folder of models in float16: gemma2, which vLLM refuses in it, and qwen2."""
    root = tmp_path_factory.mktemp("models")
    for name in ("gemma2", "qwen2"):
        folder(root / name, name, dtype="float16")
    return root


@pytest.fixture(scope="module")
def patched(trees) -> Tree:
    return identify_tree(trees["patched"])


MODEL = "actor_rollout_ref.model.path={}"
GEMMA, QWEN, UNKNOWN = (MODEL.format(name) for name in ("{}/gemma2", "{}/qwen2", "owner/name"))
SERVER, EXTRA = f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.engine_kwargs.vllm.dtype"
REWARD_SERVER = [f"{REWARD}.rollout.name=vllm", f"{REWARD}.model_path={{}}/gemma2", f"{REWARD}.rollout.dtype=float16"]


@pytest.mark.subprocess  # it composes a configuration a row
@pytest.mark.parametrize(
    ("words", "verdict", "keys"),
    [
        ([GEMMA, "+precision=fp16"], "refused", [f"{ROLLOUT}.dtype"]),
        ([GEMMA, SERVER, f"+{EXTRA}=float16"], "refused", [EXTRA]),
        ([*REWARD_SERVER, f"{REWARD}.enable=true"], "refused", [f"{REWARD}.rollout.dtype"]),
        (REWARD_SERVER, "agree", []),  # it is not enabled
        ([GEMMA, "+precision=fp16", f"{ROLLOUT}.name=sglang"], "agree", []),
        ([GEMMA, "+precision=fp16", f"{ROLLOUT}.dtype=bfloat16"], "asked", None),
        ([GEMMA, "+precision=fp16", f"{ROLLOUT}.dtype=auto", SERVER], "differ", None),  # vLLM makes it bfloat16
        ([QWEN, "+precision=fp16", f"{ROLLOUT}.dtype=auto", SERVER], "agree", [f"{ROLLOUT}.dtype"]),
        ([UNKNOWN, "+precision=fp16"], "agree", ["actor_rollout_ref.model.path"]),
    ],
)
def test_doctor_refuses_a_server_in_float16(patched, models, words, verdict, keys):
    found = diagnose(patched, [word.format(models) for word in words])
    assert found.verdict == verdict and (verdict != "agree" or found.verdict in SOUND)
    assert keys is None or [finding.key for finding in found.findings] == keys
    if verdict == "refused":
        assert "refuses gemma2 models in float16: Numerical instability" in found.sentence
        fix = found.findings[0].fix
        of_policy = keys[0] in (f"{ROLLOUT}.dtype", EXTRA)
        assert fix.startswith(f"{keys[0]}={'float32 (' if of_policy else 'bfloat16, '}") and "float32" in fix
        assert fix.endswith(", or +precision=bf16") == of_policy, "beside fp16, bfloat16 would gain nothing"
    if words == [UNKNOWN, "+precision=fp16"]:
        assert found.sentence.endswith("is not known: owner/name has no config.json on this machine.")


@pytest.mark.parametrize(
    ("words", "runs"),
    [
        ([f"ARGS={ROLLOUT}.dtype=bfloat16"], True),
        ([f"ARGS={ROLLOUT}.name=sglang"], True),
        ([f"ARGS=+{EXTRA}=bfloat16"], True),
        (["PRECISION=bf16", f"ARGS=+{EXTRA}=half"], False),
        (["PRECISION=bf16_train_fp16_infer"], False),
    ],
)
def test_run_is_refused_for_the_dtype_that_vllm_would_use(words, runs, models, tmp_path):
    job = parse_job(["DEVICE=cpu", "STEPS=1", f"MODEL={models}/gemma2", *words])
    refusal = pytest.raises(Refused, match=f"^MODEL={models}/gemma2: vLLM .* refuses gemma2 models in float16")
    with nullcontext() if runs else refusal:
        check_rollout(job, compose(job, tmp_path))


@pytest.mark.parametrize(
    ("regime", "cache", "runs"), [("fp16", "bfloat16", False), ("bf16", "float16", False), ("fp16", "fp8", True)]
)
def test_run_is_refused_for_a_cache_whose_bits_vllm_would_misread(regime, cache, runs, models, tmp_path):
    words = [f"PRECISION={regime}", f"ARGS=+{ROLLOUT}.engine_kwargs.vllm.kv_cache_dtype={cache}"]
    job = parse_job(["DEVICE=cpu", "STEPS=1", f"MODEL={models}/qwen2", *words])
    refusal = pytest.raises(Refused, match=f"^ARGS={ROLLOUT}.engine_kwargs.vllm.kv_cache_dtype={cache}: vLLM writes")
    with nullcontext() if runs else refusal:
        check_rollout(job, compose(job, tmp_path))


@pytest.mark.parametrize(
    ("server", "device", "runs"), [("vllm", "cpu", False), ("vllm", "cuda", True), ("hf", "cpu", True)]
)
def test_run_is_refused_for_determinism_that_vllm_lacks_on_a_cpu(server, device, runs, models, tmp_path):
    key = f"{ROLLOUT}.full_determinism"
    job = parse_job(["DEVICE=cpu", "STEPS=1", f"MODEL={models}/qwen2", f"ARGS={key}=true {ROLLOUT}.name={server}"])
    refusal = pytest.raises(Refused, match=f"^ARGS={key}=true: .* CPU build .*; give ARGS={key}=false, or DEVICE=cuda$")
    with nullcontext() if runs else refusal:
        check_rollout(replace(job, device=device), compose(job, tmp_path))


def test_run_and_probe_by_vllm_are_refused_and_a_probe_by_hf_reports_it(models, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run, "interrupt_on_signals", lambda: None)
    words = ["DEVICE=cpu", f"MODEL={models}/gemma2", f"OUT={tmp_path}/out"]
    with pytest.raises(Refused, match=f"^MODEL={models}/gemma2: vLLM ") as refused:
        run.main(run.parse(words))
    assert f"; give ARGS={ROLLOUT}.dtype=float32 (" in str(refused.value) and "PRECISION=bf16" in str(refused.value)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "data.parquet").write_bytes(b"PAR1")
    words.append(f"DATA={tmp_path}/data.parquet")
    with pytest.raises(Refused, match="leave out bf16_train_fp16_infer and fp16: PRECISION='bf16 fp32'"):
        probe.main(probe.parse([*words, "BACKEND=vllm"]))
    check_regimes(probe.parse([*words, "BACKEND=hf"]))
    assert "it can be measured in fp16 here, and not run in it" in capsys.readouterr().out


def test_installed_vllm_says_that_it_ignores_the_head_dtype_before_0_28():
    package = vllm_float16.package_folder("vllm", None)
    release = tuple(map(int, vllm_float16.version(package).split(".")[:2]))
    assert (POOLING_HEADS in (package / "config/model.py").read_text()) == (release < (0, 28))


KEEP = "actor_rollout_ref.actor.fsdp_config.keep_fp32_modules"
HEAD = f"{ROLLOUT}.engine_kwargs.vllm.hf_overrides.head_dtype"
SGLANG = f"{ROLLOUT}.engine_kwargs.sglang.enable_fp32_lm_head"
OUT = f"or remove lm_head from {KEEP}"
ONLY = "computes the head in fp32 only in the {}"


@pytest.mark.subprocess
@pytest.mark.parametrize(
    ("ignores", "words", "logits", "findings"),
    [
        (False, [f"{KEEP}=[lm_head]"], ["float32"] * 2, []),
        (False, [f"{KEEP}=[lm_head]", f"{ROLLOUT}.keep_fp32_modules=[]"], ["float32", "float16"],
         [(KEEP, ONLY.format("trainer"), f"remove {ROLLOUT}.keep_fp32_modules")]),
        (True, [f"{KEEP}=[lm_head]", f"{ROLLOUT}.keep_fp32_modules=[]"], ["float32", "float16"],
         [(KEEP, ONLY.format("trainer"), f"vLLM 0.28 or later, then remove {ROLLOUT}.keep_fp32_modules; {OUT}")]),
        (False, [f"{KEEP}=[lm_head]", f"+{HEAD}=float16"], ["float32", "float16"],
         [(KEEP, ONLY.format("trainer"), f"++{HEAD}=float32")]),
        (True, [f"{KEEP}=[lm_head]", f"{ROLLOUT}.keep_fp32_modules=[]", f"+{HEAD}=float16"], ["float32", "float16"],
         [(KEEP, ONLY.format("trainer"), f"vLLM 0.28 or later, then ++{HEAD}=float32; {OUT}")]),
        (False, [f"+{HEAD}=float32"], ["float16", "float32"], [(HEAD, ONLY.format("rollout"), f"{KEEP}=[lm_head]")]),
        (False, [f"+{HEAD}=float16"], ["float16"] * 2, []),
        (False, [f"+{HEAD}=model"], ["float16"] * 2, []),
        (True, [f"+{HEAD}=float16"], ["float16"] * 2, []),
        (True, [f"+{HEAD}=float32"], ["float16"] * 2,
         [(HEAD, "is ignored by vLLM 0.9.1, which reads it for pooling models: its head is in float16",
           "vLLM 0.28 or later, or remove it and lm_head from keep_fp32_modules")]),
        (False, [f"{ROLLOUT}.name=sglang", f"{KEEP}=[lm_head]"], ["float32", "float16"],
         [(KEEP, ONLY.format("trainer"), f"++{SGLANG}=true")]),
        (False, [f"{ROLLOUT}.name=sglang", f"{KEEP}=[lm_head]", f"+{SGLANG}=false"], ["float32", "float16"],
         [(KEEP, ONLY.format("trainer"), f"++{SGLANG}=true")]),
        (False, [f"{ROLLOUT}.name=sglang", f"{KEEP}=[lm_head]", f"+{SGLANG}=false", f"++{SGLANG}=true"],
         ["float32"] * 2, []),
        (False, [f"{ROLLOUT}.name=sglang", f"{KEEP}=[lm_head]", f"+{SGLANG}=true"], ["float32"] * 2, []),
    ],
)  # fmt: skip
def test_doctor_finds_a_head_in_fp32_on_one_side(ignores, words, logits, findings, patched, tmp_path):
    """vLLM 0.24, of verl 0.9.1's own extras, reads its key for pooling models."""
    root = site(tmp_path, f'WARNING = "{POOLING_HEADS}, "' if ignores else "")
    (root / "verl").symlink_to(patched.root / "verl")
    found = diagnose(identify_tree(root), ["+precision=fp16", f"{ROLLOUT}.name=vllm", *words])
    assert [found.hops[f"{side}.logits"].effective_dtype for side in ("actor", "rollout")] == logits
    assert [(finding.key, finding.effect, finding.fix) for finding in found.findings] == findings


@pytest.mark.subprocess
def test_a_head_in_fp32_is_refused_where_vllm_would_ignore_it(patched, tmp_path):
    root = site(tmp_path, f'WARNING = "{POOLING_HEADS}, "')
    (root / "verl").symlink_to(patched.root / "verl")
    found = diagnose(identify_tree(root), ["+precision=fp16", f"{ROLLOUT}.name=vllm", f"{KEEP}=[lm_head]"])
    assert found.verdict == "refused" and "vLLM 0.9.1 cannot compute lm_head in fp32" in found.refused


@pytest.mark.subprocess
@pytest.mark.parametrize(
    ("state", "method", "words", "refused"),
    [
        ("pristine", "get_rename_mapper", [], True),
        ("pristine", "get_rename_mapper", ["++actor_rollout_ref.model.lora.merge=true"], False),
        ("pristine", "get_unstacked_mapper", [], False),
        ("patched", "get_rename_mapper", [], False),  # with both series
    ],
)
def test_unmerged_lora_is_refused_where_vllm_renamed_what_verl_calls(state, method, words, refused, trees, tmp_path):
    root = site(tmp_path, "")
    write(root / "vllm/model_executor/models/utils.py", f"def {method}(self): ...\n".encode())
    (root / "verl").symlink_to(trees[state] / "verl")
    found = diagnose(identify_tree(root), [f"{ROLLOUT}.name=vllm", "actor_rollout_ref.model.lora_rank=4", *words])
    assert ("calls a method that vLLM 0.29 renamed" in (found.refused or "")) == refused, found.refused
    if refused:
        assert found.findings[0].fix.endswith(f"vLLM before 0.29, or make apply-patches VERL={root} FIXES=yes")


@pytest.mark.subprocess
def test_unmerged_lora_is_refused_with_the_vllm_of_this_python(trees, monkeypatch, tmp_path):
    """The tree has none beside it, as a checkout."""
    write(site(tmp_path, "") / "vllm/model_executor/models/utils.py", b"def get_rename_mapper(self): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    words = [f"{ROLLOUT}.name=vllm", "actor_rollout_ref.model.lora_rank=4"]
    found = diagnose(identify_tree(trees["pristine"]), words)
    assert "fails with vLLM 0.9.1: " in found.refused and "renamed" in found.refused
