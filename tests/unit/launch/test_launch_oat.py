"""``scripts/launch/oat_sanity.sh``: refusals, and the commands that it runs, parsed by OAT's own parser."""

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest
from support.fork_server import ForkServer
from support.launch_machine import knobs_and_arguments
from support.oat_server import oat_server, oat_variables
from support.selected import every_release
from support.trees import patched_tree

from verl_precision.patch.apply import apply
from verl_precision.patch.releases import OAT, load_releases
from verl_precision.patch.wheels import unpacked_wheel

PARSER = Path(__file__).with_name("oat_parser.py")
NEWEST = list(load_releases(framework=OAT))[-1]
WRITTEN = "as datasets' save_to_disk writes it; make sanity-math writes data/sanity-math/oat"
REGIMES = ("bf16", "bf16_train_fp16_infer", "fp16", "fp32")
WEIGHTS = {  # of each objective: rollout_is, its threshold, rollout_rs, its threshold, reinforce_update, critic_type
    "grpo": ("None", "2.0", "None", "None", "False", "grpo"),
    "dr_grpo": ("None", "2.0", "None", "None", "False", "drgrpo"),
    "tis": ("token", "2.0", "None", "None", "False", "drgrpo"),
    "mis": ("sequence", "10.0", "sequence", "10.0", "False", "drgrpo"),
    "pg_is": ("sequence", "inf", "None", "None", "True", "drgrpo"),
}
Launch = Callable[..., subprocess.CompletedProcess]


@pytest.fixture(scope="session")
def oats(tmp_path_factory) -> dict[str, Path]:
    """Trees of the newest OAT, "pristine" and "patched"."""
    trees = {state: unpacked_wheel(NEWEST, tmp_path_factory.mktemp(state), OAT) for state in ("pristine", "patched")}
    apply(trees["patched"], framework=OAT)
    return trees


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    """Splits train and test as ``recipes.sanity_math.prepare`` writes them, and one without answers."""
    import datasets

    folder = tmp_path_factory.mktemp("data") / "oat"
    rows = datasets.Dataset.from_dict({"problem": ["1+1?", "2+2?"], "answer": ["2", "4"]})
    splits = {"train": rows, "test": rows, "unanswered": rows.remove_columns("answer")}
    datasets.DatasetDict(splits).save_to_disk(folder)
    return folder


@pytest.fixture
def launch(oats, data, machine) -> Launch:
    """``launch(*words, tree=…, **knobs)``: run the script with a Python that has the OAT of a tree."""

    def run(*words: str, tree: Path = oats["patched"], **knobs: object) -> subprocess.CompletedProcess:
        usual = {"PYTHONPATH": tree, "TRAIN": data, "OAT_PYTHON": sys.executable, "OUT": machine.folder / "out"}
        return machine.run("oat_sanity.sh", *words, **usual | knobs)

    return run


FIRST = "must be --dry-run, in the first place, or an argument of OAT"
# By knobs and arguments; {data} is the folder of the data.
REFUSED = {
    "PRECISION='fp16 fp61'": "PRECISION=fp61: must be one of bf16, bf16_train_fp16_infer, fp16, fp32",
    "ALGO=ppo": "ALGO=ppo: must be one of grpo, dr_grpo, tis, mis, pg_is",
    "SEED=one": "SEED=one: must be a whole number",
    "SEED=' '": "PRECISION=fp16 ALGO=dr_grpo SEED= : must each have a value",
    "SEED='1 2 1'": "dr_grpo-fp16-seed1: is requested twice",
    "GPUS=0": "GPUS=0: must be a whole number of at least 1",
    "GPUS=6": "GPUS=6: must divide the 64 prompts of a round",
    "TRAIN=/no/data": f"TRAIN=/no/data: has no split train {WRITTEN}",
    "EVAL=/no/data": f"EVAL=/no/data: has no split test {WRITTEN}",
    "TEST_SPLIT=test,aime": f"EVAL={{data}}: has no split aime {WRITTEN}",
    "TEST_SPLIT=unanswered": "EVAL={data}: its split unanswered has no column answer",
    "TEMPLATE=llama3": f"TEMPLATE=llama3: OAT {NEWEST} has qwen_math, r1, no, r1_distill_qwen, qwen3",
    "MODEL=/no/model": "MODEL=/no/model: contains no config.json",
    "PYTHON=/no/python": "PYTHON=/no/python: must be Python 3.10 or later",
    "OAT_PYTHON=/no/python": "OAT_PYTHON=/no/python: has no OAT; give a Python that has it",
    # What the name of a run contains cannot be overridden.
    "--precision bf16": "--precision: set PRECISION",
    "--dry-run --precision bf16": "--precision: set PRECISION",
    "--eval_steps 32": "--eval_steps: set EVAL_STEPS",
    "--save_path x": "--save_path: set OUT; a run is named by ALGO, PRECISION and SEED",
    "--use-wb --dry-run": "--dry-run: must be --dry-run, as the first argument",
    "--help": "--help: the knobs are listed at the top of the script; docs/how-to/oat.md describes the rest",
    "--use-wb --critic_type grpo": "--critic_type: set ALGO",
    "trainer.save_freq=3": f"trainer.save_freq=3: {FIRST}, like --use-wb",
}


@pytest.mark.parametrize("words", REFUSED)
def test_refused_in_one_line_before_anything_starts(words, launch, data, machine):
    knobs, options = knobs_and_arguments(words)
    done = launch(*options, **knobs)
    message = f"oat_sanity: {REFUSED[words].format(data=data)}\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", message)
    assert not (machine.folder / "out").exists()


def test_unpatched_oat_is_refused(oats, launch, tmp_path):
    changed = shutil.copytree(oats["pristine"], tmp_path / "changed")
    with (changed / "oat/args.py").open("a") as file:
        file.write("# mine\n")
    remedy = f"unpatched; make apply-patches OAT={oats['pristine']}\n"
    for tree, state in ((oats["pristine"], remedy), (changed, "dirty: ")):
        done = launch(tree=tree)
        assert done.returncode == 1 and done.stderr.count("\n") == 1
        assert done.stderr.startswith(f"oat_sanity: OAT_PYTHON={sys.executable}: its OAT is {state}"), done.stderr


def test_existing_run_is_refused_before_any_starts(launch, tmp_path):
    there = tmp_path / "tis-bf16-seed2_1122T03:00:00"
    there.mkdir()
    knobs = {"OUT": tmp_path, "ALGO": "grpo tis", "PRECISION": "fp16 bf16", "SEED": "1 2"}
    done = launch("--dry-run", **knobs)
    message = f"oat_sanity: OUT={tmp_path}: contains {there} already; choose another OUT, or leave out tis-bf16-seed2\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", message)
    assert launch("--dry-run", **knobs | {"SEED": "1 3"}).returncode == 0


def every_command(launch: Launch, **knobs: object) -> list[list[str]]:
    """Return OAT's arguments of every objective in every regime."""
    done = launch("--dry-run", ALGO=" ".join(WEIGHTS), PRECISION=" ".join(REGIMES), GPUS=4, **knobs)
    assert done.returncode == 0, done.stderr
    commands = [shlex.split(command) for command in done.stdout.splitlines()]
    assert all(words[1:3] == ["-m", "oat.experiment.run_math_rl"] for words in commands)
    return [words[3:] for words in commands]


def test_names_are_unique_and_everything_else_is_equal(launch):
    """The authors' scripts share names between objectives, and evaluate every 16 or 32 rounds."""
    given, alike = {}, set()
    for words in every_command(launch, SEED="1 2"):
        values = {}
        for option in ("--wb_run_name", "--precision", "--seed"):
            at = words.index(option) + 1
            values[option], words[at] = words[at], ""
        name, precision, seed = values.values()
        given[name] = (precision, seed)
        attention = "--no-flash-attn" if precision == "fp32" else "--flash-attn"
        assert attention in words, "flash attention supports only 16 bits"
        words.remove(attention)
        for option, value in {"steps": "16", "temperature": "0.6", "top_p": "0.95"}.items():
            assert words[words.index(f"--eval_{option}") + 1] == value
        alike.add(" ".join(words))
    assert given == {f"{algo}-{of}-seed{seed}": (of, seed) for algo, of, seed in product(WEIGHTS, REGIMES, "12")}
    assert len(alike) == len(WEIGHTS), "regimes and seeds of one objective differ in nothing else"


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[ForkServer]:
    with oat_server(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.mark.parametrize(("gpus", "share"), [(2, "256"), (8, "64")])
def test_buffer_of_a_learner_holds_its_share_of_a_round(gpus, share, launch):
    words = shlex.split(launch("--dry-run", ALGO="grpo", PRECISION="fp16", GPUS=gpus).stdout)
    assert words[words.index("--pi_buffer_maxlen_per_device") + 1] == share
    assert words[words.index("--train_batch_size") + 1] == "128", "four updates a round, on any number of GPUs"


@pytest.mark.parametrize("release", load_releases(framework=OAT))
def test_oats_own_weights_are_off_where_it_has_them(release, launch, tmp_path):
    tree = patched_tree(release, tmp_path / "tree", None, OAT)
    words = shlex.split(launch("--dry-run", tree=tree).stdout)
    assert ("--tis_c" in words) == ("tis_c:" in (tree / "oat/algorithms/ppo.py").read_text())


@pytest.mark.releases
@pytest.mark.subprocess
@pytest.mark.parametrize("release", every_release(OAT))
def test_oats_own_parser_accepts_every_command(release, launch, server, data, tmp_path):
    """The patched release's parser and validation, with every objective in every regime."""
    tree = patched_tree(release, tmp_path / "tree", None, OAT)
    commands = every_command(launch, tree=tree)
    given = tmp_path / "commands"
    given.write_text(json.dumps(commands))
    server.check([PARSER, given], oat_variables(tree), tmp_path, ranks=1)
    settled = json.loads(given.with_suffix(".settled").read_text())
    names = ("rollout_is", "rollout_is_threshold", "rollout_rs", "rollout_rs_threshold", "reinforce_update")
    expected = {"gpus": "4", "collocate": "True", "vllm_sleep": "True", "rollout_batch_size_per_device": "16"}
    expected |= {"pi_buffer_maxlen_per_device": "128", "learning_rate": "1e-06", "lr_scheduler": "constant"}
    expected |= {"beta": "0.0", "prompt_data": str(data), "eval_data": str(data), "test_split": "test"}
    for args, (algo, precision) in zip(settled, product(WEIGHTS, REGIMES), strict=True):
        assert (args["wb_run_name"], args["precision"], args["seed"]) == (f"{algo}-{precision}-seed1", precision, "1")
        assert (args["bf16"], args["fp16"]) == (str(precision.startswith("bf16")), str(precision == "fp16"))
        assert tuple(args[name] for name in (*names, "critic_type")) == WEIGHTS[algo]
        assert args.get("tis_c", "None") == "None", "OAT's own weights would be a second correction"
        assert args["flash_attn"] == str(precision != "fp32"), "flash attention supports only 16 bits"
        assert {name: args[name] for name in expected} == expected


def test_runs_are_sequential_and_an_unfinished_one_is_named(launch, machine):
    """OAT is a stub here: it records its arguments, writes metrics and exits with 0, as launchpad always does."""
    folder = machine.folder
    oat = machine.program(
        "oat-python",
        f"""if [[ $1 == -c ]]; then exec {shlex.quote(sys.executable)} "$@"; fi
printf '%s\\n' "$*" >> {folder}/given
given=$*
name=${{given#*--wb_run_name }}
folder={folder}/out/${{name%% *}}_1122T03:00:00
mkdir -p "$folder"
rounds="1 2"
if [[ $* != *--precision\\ fp16* ]]; then rounds="1 2 2"; fi
for round in $rounds; do echo "{{\\"step\\": $round, \\"data\\": {{}}}}" >> "$folder/metrics.jsonl"; done""",
    )
    knobs = {"PRECISION": "bf16 fp16", "ALGO": "grpo mis", "OAT_PYTHON": oat}
    done = launch("--use-wb", "--learning_rate", "2e-6", **knobs)
    assert done.returncode == 1
    assert done.stderr == "oat_sanity: these runs failed: grpo-fp16-seed1 mis-fp16-seed1\n"
    names = ["grpo-bf16-seed1", "grpo-fp16-seed1", "mis-bf16-seed1", "mis-fp16-seed1"]
    assert done.stdout.splitlines() == [f"oat_sanity: {name}" for name in names]
    given = (folder / "given").read_text().splitlines()
    ends = [line.partition("--wb_run_name ")[2] for line in given]
    assert ends == [f"{name} --use-wb --learning_rate 2e-6" for name in names]
    done = launch(**knobs | {"PRECISION": "bf16", "ALGO": "grpo", "SEED": "2"})
    assert (done.returncode, done.stderr) == (0, "")
