"""A throughput benchmark: parameters for each request, lengths of their own, a random tokenizer's vocabulary."""

import dataclasses
import random
import sys
import time

from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs import TextPrompt, TokensPrompt
from vllm.lora.request import LoRARequest  # noqa: F401

llm = LLM(**dataclasses.asdict(EngineArgs(model=sys.argv[1], max_num_seqs=16, enable_chunked_prefill=True)))
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
