"""A latency benchmark: random token ids of given length, no detokenization, exactly as many tokens as asked for."""

import dataclasses
import sys
import time

import numpy as np
from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs import PromptType  # noqa: F401

engine_args = EngineArgs(model=sys.argv[1], enforce_eager=True, max_model_len=128, disable_log_stats=True)
llm = LLM(**dataclasses.asdict(engine_args))
assert llm.llm_engine.model_config.max_model_len >= 32 + 16
params = SamplingParams(n=1, temperature=1.0, top_p=1.0, ignore_eos=True, max_tokens=16, detokenize=False)
dummy = np.random.randint(1000, size=(8, 32))
prompts = [{"prompt_token_ids": batch} for batch in dummy.tolist()]
times = []
for _ in range(2):
    start = time.perf_counter()
    outputs = llm.generate(prompts, sampling_params=params, use_tqdm=False)
    times.append(time.perf_counter() - start)
assert all(len(o.outputs[0].token_ids) == 16 and o.outputs[0].text == "" for o in outputs)
assert np.percentile(times, 50) > 0
