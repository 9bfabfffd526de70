"""Train a language model in bf16 and in fp16 with importance weights.

Runs verl's main_ppo with Ray, FSDP and vLLM on the recall task (recipes/recall). Its logits are lifted so that k3 adds
up to 8 nats per answer in bf16. Writes a report with the accuracy (the reward) and k3 of both runs to
OUT/report/index.html. The same command resumes.

Exit code 0: done, whatever the outcome; 1: refused, or a run failed; 130: interrupted.
"""

from verl_precision.collapse.outcomes import FEWEST_STEPS, describe_pair
from verl_precision.paths import OUTPUTS
from verl_precision.report.build import write_report
from verl_precision.run import sweep
from verl_precision.words import parse_words, whole_number

VARIABLES = {
    "SEED": "seed of the data order and of sampling, default 1",
    "STEPS": "training steps, default 40",
    "DEVICE": "cpu or cuda, default: cuda where there is a GPU",
    "OUT": "the folder of the runs, default outputs/collapse",
}
RECALL = {"EXPERIMENT": "recall", "ALGO": "pg_is", "PRECISION": "bf16 fp16"}


def parse(words: list[str]) -> dict[str, str]:
    """Return the variables of the sweep, or refuse a name or a value."""
    values = parse_words(words, VARIABLES)
    for name, least in (("SEED", 0), ("STEPS", FEWEST_STEPS)):
        whole_number(values, name, least, None)
    values = {"SEED": "1", "STEPS": "40", "OUT": str(OUTPUTS / "collapse")} | values | RECALL
    sweep.check_words(values)
    return values


def main(values: dict[str, str]) -> int:
    plan = sweep.plan_sweep(values)
    outcome = sweep.run_sweep(plan)
    for run in outcome.failed:
        print(f"failed: {run}, {run.out / 'train.log'}")
    if outcome.code:
        print("repeat the command to resume")
        return outcome.code
    out = plan.out / "report"
    report = write_report(outcome.finished[RECALL["ALGO"]], out, title="The recall task in bf16 and in fp16")
    bf16, fp16 = (entry.run for entry in report.entries)
    print("\n" + "\n".join(describe_pair(bf16, fp16)) + f"\n\n  {out / 'index.html'}")
    return 0
