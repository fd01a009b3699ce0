"""Benchmarks of latency and throughput: random token ids, exactly the tokens asked for, detokenized or not."""

import dataclasses
import random
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs import PromptType, TextPrompt, TokensPrompt  # noqa: F401
from vllm.lora.request import LoRARequest  # noqa: F401

traces = tempfile.TemporaryDirectory()
engine_args = EngineArgs(
    model=sys.argv[1], enforce_eager=True, max_model_len=128, disable_log_stats=True, cpu_offload_gb=0.0,
    max_num_seqs=16, enable_chunked_prefill=True,
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

random.seed(0)
vocab_size = llm.llm_engine.model_config.get_vocab_size()
requests = [(random.choices(range(3, vocab_size), k=random.randint(4, 40)), random.randint(1, 20)) for _ in range(24)]
prompts = [TokensPrompt(prompt_token_ids=ids) for ids, _ in requests] + [TextPrompt(prompt="count to 5")]
params = [
    SamplingParams(n=1, temperature=1.0, top_p=1.0, ignore_eos=True, max_tokens=length, detokenize=True)
    for length in [length for _, length in requests] + [3]
]
assert all(llm.llm_engine.model_config.max_model_len >= len(ids) + length for ids, length in requests)
start = time.perf_counter()
outputs = llm.generate(prompts, params, lora_request=[None] * len(prompts), use_tqdm=True)
elapsed = time.perf_counter() - start
assert [len(o.outputs[0].token_ids) for o in outputs] == [p.max_tokens for p in params] and elapsed > 0
assert outputs[-1].prompt == "count to 5" and outputs[0].prompt is None
