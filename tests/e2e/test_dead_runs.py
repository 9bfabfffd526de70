"""A run with a dead process, or one that waits for resources that Ray never gets, ends and reports why."""

import pytest
from processes import shared_memory
from small_runs import ROLLOUT, small_batch, start_run

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
STEPS = 3
# A dataset that blocks forever; verl loads it first. Other parts of verl may block likewise.
DATASET = """
import os, signal, time
import ray
from verl.utils.dataset.rl_dataset import RLHFDataset

class Waits(RLHFDataset):
    def __init__(self, *_, **__):
        {body}
"""
KILLED = """class vLLMHttpServer:
            def answer(self):
                signal.pause()

        server = ray.remote(vLLMHttpServer).remote()
        pid = ray.get(server.__ray_call__.remote(lambda _: print("serving", flush=True) or os.getpid()))
        server.answer.remote()
        os.kill(pid, signal.SIGKILL)
        signal.pause()
"""
INFEASIBLE = "ray.get(ray.remote(num_gpus=64)(lambda: None).remote())"


@pytest.mark.parametrize(
    ("body", "why", "line"),
    [
        # Ray reports it two minutes later.
        (INFEASIBLE, "Ray lacks the resources that verl requests", "No available node types can fulfill"),
        (KILLED, "vLLMHttpServer (pid ", "A worker died or was killed"),
    ],
    ids=["infeasible", "killed"],
)
def test_run_that_waits_forever_is_ended_at_its_start(body, why, line, tmp_path):
    file = tmp_path / "waits.py"
    file.write_text(DATASET.format(body=body))
    run = start_run(tmp_path / "run", STEPS, [f"data.custom_cls.path={file}", "data.custom_cls.name=Waits"])
    shown = run.finish(code=1)
    assert f"failed after step 0 of 3, ended because {why}" in shown
    assert line in shown, "the evidence"
    assert run.processes == []


def test_vllms_refusal_of_a_setting_is_shown(exclusive, tmp_path):
    overrides = [*small_batch(), f"+{ROLLOUT}.engine_kwargs.vllm.block_size=-1"]
    shown = start_run(tmp_path / "run", STEPS, overrides).finish(code=1)
    assert "failed after step 0 of 3" in shown and "block_size" in shown.split("train.log")[-1], shown


def test_run_whose_engine_is_killed_in_the_first_step_is_ended(exclusive, tmp_path):
    run = start_run(tmp_path / "run", STEPS, small_batch())
    run.wait_for(lambda: "starting the first step" in run.shown)
    engines = [process for process in run.processes if "EngineCore" in "".join(process.cmdline())]
    mapped = shared_memory(engines)
    for process in engines:
        process.kill()
    shown = run.finish(code=1)
    assert engines and mapped and "failed after step 0 of 3, ended because vLLM's engine died" in shown
    assert run.processes == [] and not any(file.exists() for file in mapped)
