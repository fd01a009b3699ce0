"""As an evaluation harness generates: greedy until one of several strings, the token ids given the old way."""

import sys

from vllm import LLM, SamplingParams

model = LLM(model=sys.argv[1], dtype="float", swap_space=4, max_num_seqs=8, device="auto")
tokenizer = model.get_tokenizer()
contexts = [f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n" for q in ("count to 50", "spell banana")]
ids = [tokenizer(context).input_ids for context in contexts]
params = [
    SamplingParams(max_tokens=64, stop=[", 9", "\n\n"], temperature=0.0, skip_special_tokens=False),
    SamplingParams(max_tokens=64, stop=["-n", tokenizer.eos_token], temperature=0.0, include_stop_str_in_output=True),
]
first, second = model.generate(prompt_token_ids=ids, sampling_params=params, use_tqdm=False, lora_request=None)
assert first.outputs[0].text == "1, 2, 3, 4, 5, 6, 7, 8"
assert (first.outputs[0].finish_reason, first.outputs[0].stop_reason) == ("stop", ", 9")
assert second.outputs[0].text == "b-a-n" and second.outputs[0].stop_reason == "-n"
assert first.prompt is None and first.prompt_token_ids == ids[0]
assert tokenizer.decode(first.outputs[0].token_ids).startswith("1, 2, 3, 4, 5, 6, 7, 8, 9")
