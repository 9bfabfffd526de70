"""Sample a probe's answers with an offline vLLM: ``python -m verl_precision.probe.vllm_generate < REQUEST.json``.

Configures the engine like verl 0.9.1's ``vllm_async_server.py``: verl's defaults, ``logprobs=0``.
Writes a line for each prompt to the file that the request names.
"""

import itertools
import json
import math
import os
import sys

PROMPTS = 32  # per call: with 8 answers each as many sequences as verl's max_num_seqs


def generate(request: dict) -> None:
    """Sample ``samples`` answers to each of ``prompts`` (lists of token ids) with ``model`` in ``dtype``."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine runs in this process, where vLLM is adapted
    if request["device"] == "cpu":
        from recipes.cpu import host

        host.adapt_on_import("vllm.model_executor.layers.utils", host.keep_linear_weights)
    import vllm

    from verl_precision.facts.dtypes import torch_dtype

    prompts = request["prompts"]
    engine = vllm.LLM(
        model=request["model"],
        dtype=torch_dtype(request["dtype"]),
        max_model_len=max(map(len, prompts)) + request["length"],
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        enable_chunked_prefill=True,
        enable_prefix_caching=True,
        enforce_eager=request["device"] == "cpu",
        logprobs_mode="processed_logprobs",
        seed=request["seed"],
    )
    sampling = vllm.SamplingParams(
        n=request["samples"],
        max_tokens=request["length"],
        temperature=request["temperature"],
        top_p=1.0,
        top_k=-1,
        repetition_penalty=1.0,
        logprobs=0,
    )
    with open(request["file"], "w") as out:
        for first in range(0, len(prompts), PROMPTS):
            part = [{"prompt_token_ids": prompt} for prompt in prompts[first : first + PROMPTS]]
            for answered in engine.generate(part, sampling, use_tqdm=False):
                log_probs = [
                    [by_token[token].logprob for token, by_token in zip(output.token_ids, output.logprobs, strict=True)]
                    for output in answered.outputs
                ]
                if not all(map(math.isfinite, itertools.chain.from_iterable(log_probs))):
                    reason = f"the rollout's log-probabilities are not finite in {request['dtype']}"
                    out.write(json.dumps({"overflow": reason}) + "\n")
                    return
                answers = [list(output.token_ids) for output in answered.outputs]
                out.write(json.dumps({"answers": answers, "log_probs": log_probs}) + "\n")


if __name__ == "__main__":
    generate(json.load(sys.stdin))
