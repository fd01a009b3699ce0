"""Penalties, biases, bad words, minimum lengths: each visible in what is generated."""

import sys

from vllm import LLM, SamplingParams

llm = LLM(model=sys.argv[1], max_num_seqs=8)
tokenizer = llm.get_tokenizer()
messages = [{"role": "user", "content": "2 + 3"}]
prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
(five,) = tokenizer.encode("5")
(seven,) = tokenizer.encode("7")


def ids(**params):
    (output,) = llm.generate([prompt], SamplingParams(**{"temperature": 0, "max_tokens": 6, **params}), use_tqdm=False)
    return list(output.outputs[0].token_ids)


assert ids() == [five, 2]
assert ids(logit_bias={seven: 100.0}, max_tokens=1) == [seven]
assert ids(allowed_token_ids=[seven], max_tokens=3) == [seven] * 3
assert five not in ids(bad_words=["5"])
assert len(ids(min_tokens=5)) >= 5
repeated = ids(ignore_eos=True, max_tokens=40)
assert len(set(ids(ignore_eos=True, max_tokens=40, frequency_penalty=2.0, presence_penalty=2.0))) > len(set(repeated))
assert ids(repetition_penalty=1.0, presence_penalty=0, frequency_penalty=0) == [five, 2]
assert ids(repetition_penalty=1.5) != []
(output,) = llm.generate(prompt, SamplingParams(temperature=0, stop_token_ids=[five]))
assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("", five)
