# /// script
# requires-python = ">=3.10"
# dependencies = ["nanovllm"]
# tool.uv.sources.nanovllm = { path = "..", editable = true }
# ///
"""A logits processor: a function of the tokens so far and of the logits. Here no token is generated twice.

It is called for each token of its request, on the device's logits; requests without one pay nothing.
"""

import torch

from nanovllm import LLM, SamplingParams


def never_again(token_ids, logits):
    logits[token_ids] = -torch.inf
    return logits


with LLM() as llm:
    chat = [{"role": "user", "content": "introduce yourself"}]
    for processors in (None, [never_again]):
        params = SamplingParams(temperature=0, max_tokens=20, logits_processors=processors)
        print("with:   " if processors else "without:", llm.chat(chat, params, use_tqdm=False)[0]["text"])
