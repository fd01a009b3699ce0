"""The engine loop gives what ``generate`` gives, whole, in deltas, and when it is final, one beside the other."""

import sys
from itertools import chain, pairwise

from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind

llm = LLM(sys.argv[1], max_num_seqs=6, max_num_batched_tokens=64, max_model_len=256, dtype="float32")
engine = llm.llm_engine
prompts = ["count to 30", "<|im_start|>user\n", "spell the word über", {"prompt_token_ids": [1, 430, 201]}] * 3
variants = [
    {"stop": [", 1", "9"]}, {"n": 3, "logprobs": 2}, {"stop": "a", "include_stop_str_in_output": True, "n": 2},
    {"skip_special_tokens": False, "ignore_eos": True}, {"logprobs": 0, "min_tokens": 5, "frequency_penalty": 0.5},
]  # fmt: skip
params = [
    SamplingParams(seed=i, temperature=1.1, max_tokens=5 + 3 * i, **variants[i % len(variants)])
    for i in range(len(prompts))
]


def of(completion):
    return completion.text, list(completion.token_ids), completion.logprobs, completion.finish_reason


expected = [[of(c) for c in output.outputs] for output in llm.generate(prompts, params, use_tqdm=False)]
kinds = list(RequestOutputKind)
for first in range(len(kinds)):
    seen = {str(i): [] for i in range(len(prompts))}
    for i, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
        p.output_kind = kinds[(first + i) % len(kinds)]
        engine.add_request(str(i), prompt, p)
    while engine.has_unfinished_requests():
        for output in engine.step():
            seen[output.request_id].append([of(c) for c in output.outputs])
    for i, outputs in enumerate(seen.values()):
        kind = params[i].output_kind
        if kind is RequestOutputKind.DELTA:
            joined = []
            for parts in zip(*outputs, strict=True):
                texts, ids, logprobs, reasons = zip(*parts, strict=True)
                whole = None if logprobs[-1] is None else list(chain.from_iterable(logprobs))
                joined.append(("".join(texts), list(chain.from_iterable(ids)), whole, reasons[-1]))
            assert joined == expected[i], (i, joined, expected[i])
            continue
        assert outputs[-1] == expected[i], (kind, i)
        texts = [output[0][0] for output in outputs]
        assert all(later.startswith(text) for text, later in pairwise(texts)), texts
        assert (len(outputs) == 1) == (kind is RequestOutputKind.FINAL_ONLY)
