"""Updates that are traced without data, against exact counts and the plan of memory."""

import json
from collections.abc import Callable

import pytest

from verl_precision.bench.trace import Trace
from verl_precision.commands import trace_update
from verl_precision.errors import Refused
from verl_precision.facts.dtypes import BYTES, SHORT_NAMES

ACTOR = "actor_rollout_ref.actor"
WITHIN = 0.15  # plan-memory's


@pytest.fixture
def traced(tmp_path, monkeypatch) -> Callable[..., tuple[Trace, str]]:
    """``traced(*words)``: the trace of one job with short sequences, and the page that the command writes of it."""
    trace_job, traces = trace_update.trace_job, []
    monkeypatch.setattr(trace_update, "trace_job", lambda *args: traces.append(trace_job(*args)) or traces[-1])

    def traced(*words: str) -> tuple[Trace, str]:
        request = trace_update.parse(["EXPERIMENT=moe_30b", "LENGTH=512", f"OUT={tmp_path / 'out'}", *words])
        assert trace_update.main(request) == 0
        return traces[-1], (tmp_path / "out/trace-update.md").read_text()

    return traced


@pytest.fixture(scope="module")
def small_experts(tmp_path_factory) -> str:
    """The words of a job with fewer experts than ranks."""
    folder = tmp_path_factory.mktemp("experts")
    sizes = {"vocab_size": 4096, "hidden_size": 512, "intermediate_size": 512, "moe_intermediate_size": 768}
    sizes |= {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", **sizes, **experts}))
    return f"MODEL={folder}"


SMALL = f"data.train_batch_size=32 {ACTOR}.ppo_mini_batch_size=32 {ACTOR}.ppo_max_token_len_per_gpu=2048"


@pytest.mark.subprocess
def test_traced_update_of_more_ranks_than_experts_agrees_with_the_plan(small_experts, traced):
    """FSDP2 gives half of the ranks no expert, and gathers and reduces as many bytes as if each had one."""
    trace, page = traced(small_experts, "PRECISION=fp16", f"ARGS=trainer.nnodes=2 {SMALL}")
    layers, vocab, hidden, width = 4, 4096, 512, 768
    experts = layers * 3 * hidden * width * 8
    others = layers * (2 * hidden * (512 + 128) + 2 * hidden + 2 * 64) + 2 * vocab * hidden + hidden
    padded = others + 2 * (experts + layers * 8 * hidden)  # the router's rows are the experts', too
    gathered, reduced = trace.micro_batch
    assert (gathered.operator, gathered.dtype) == ("all-gather", "float16")
    assert (reduced.operator, reduced.dtype) == ("reduce-scatter", "float32")
    assert gathered.size == 2 * 2 * padded and reduced.size == 4 * padded  # gathered forward and backward
    assert [(each.operator, each.dtype, each.size) for each in trace.update] == [("all-reduce", "float32", 4)]
    assert [(each.operator, each.dtype) for each in trace.sync] == [("all-gather", "float32")]
    assert trace.weights == pytest.approx(4 * padded / 16, rel=0.001)
    assert trace.weights == pytest.approx(trace.planned.resident["weights"], rel=0.01)
    assert trace.adam == pytest.approx(trace.planned.resident["Adam"], rel=0.01)
    assert trace.peak == pytest.approx(trace.planned_peak, rel=WITHIN)
    sent = f"all-gather float16: {gathered.size / 1e9:.1f}<br>reduce-scatter float32: {reduced.size / 1e9:.1f}"
    synced = f"all-gather float32: {trace.sync[0].size / 1e9:.1f}"
    assert f"| 16 | fp16 | {sent} | {trace.planned.micro_batches} | {synced} |" in page
    assert f" {trace.peak / 2**30:.1f} ({trace.planned_peak / 2**30:.1f}) |" in page


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_traced_update_agrees_with_the_plan(small_experts, traced, precision):
    trace, _ = traced(small_experts, f"PRECISION={precision}", f"ARGS=trainer.nnodes=1 {SMALL}")
    dtype, size = SHORT_NAMES[precision], BYTES[SHORT_NAMES[precision]]
    gathered, reduced = trace.micro_batch
    assert (gathered.dtype, reduced.dtype) == (dtype, "float32")
    assert gathered.size * 4 == 2 * size * reduced.size
    assert trace.peak == pytest.approx(trace.planned_peak, rel=WITHIN)
    assert trace.weights == pytest.approx(trace.planned.resident["weights"], rel=0.01)


def test_default_jobs_are_of_8_64_and_256_gpus():
    jobs = trace_update.parse([]).jobs
    assert [job.args for job in jobs[::4]] == [("trainer.nnodes=1",), ("trainer.nnodes=8",), ("trainer.nnodes=32",)]
    assert {job.model for job in jobs} == {model for _, model, _ in trace_update.DEFAULT}
    assert [job.precision for job in jobs[:4]] == ["fp16", "bf16", "bf16_train_fp16_infer", "fp32"]


@pytest.mark.parametrize(
    ("override", "supported"),
    [
        (f"{ACTOR}.strategy=fsdp", "fsdp2"),
        ("actor_rollout_ref.model.lora_rank=8", "0"),
        (f"{ACTOR}.ulysses_sequence_parallel_size=2", "1"),
        (f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=2", "1"),
        ("trainer.nnodes=1 trainer.n_gpus_per_node=1", "two ranks or more"),
    ],
)
def test_job_that_cannot_be_traced_is_refused(override, supported, tmp_path):
    words = ["EXPERIMENT=dense_7b", "PRECISION=fp16", f"OUT={tmp_path / 'out'}", f"ARGS={override}"]
    with pytest.raises(Refused) as refused:
        trace_update.main(trace_update.parse(words))
    assert str(refused.value) == f"{override}: trace-update supports {supported}" and not (tmp_path / "out").exists()
