"""A latency benchmark: random token ids of given length, no detokenization, exactly as many tokens as asked for."""

import dataclasses
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs import PromptType  # noqa: F401

traces = tempfile.TemporaryDirectory()
engine_args = EngineArgs(
    model=sys.argv[1], enforce_eager=True, max_model_len=128, disable_log_stats=True, cpu_offload_gb=0.0,
    profiler_config={"profiler": "torch", "torch_profiler_dir": traces.name},
)  # fmt: skip
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
llm.start_profile()
llm.generate(prompts[:1], SamplingParams(max_tokens=2), use_tqdm=False)
llm.stop_profile()
assert len(list(Path(traces.name).iterdir())) == 1
assert np.percentile(times, 50) > 0
