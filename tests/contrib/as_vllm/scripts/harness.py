"""As an evaluation harness asks: log-likelihoods of continuations and of whole texts; texts until a string."""

import sys
from importlib.metadata import version

import numpy as np
from packaging.version import parse
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.distributed.parallel_state import destroy_model_parallel
from vllm.entrypoints.chat_utils import resolve_hf_chat_template
from vllm.lora.request import LoRARequest  # noqa: F401
from vllm.transformers_utils.tokenizer import get_tokenizer
from vllm.utils import get_open_port

assert parse(version("vllm")) >= parse("0.9.0") and get_open_port() > 0
model = LLM(
    model=sys.argv[1], gpu_memory_utilization=0.9, revision=None, dtype="float", tokenizer=None, tokenizer_mode="auto",
    tokenizer_revision=None, trust_remote_code=False, tensor_parallel_size=1, max_model_len=None, max_num_seqs=None,
    swap_space=4, quantization=None, seed=1234, enable_lora=False, max_lora_rank=16, device="auto",
    download_dir="/no/such/directory",
)  # fmt: skip
tokenizer = get_tokenizer(sys.argv[1], tokenizer_mode="auto", trust_remote_code=False, revision=None)
template = resolve_hf_chat_template(
    tokenizer=tokenizer, chat_template=None, tools=None, model_config=model.llm_engine.model_config,
    trust_remote_code=False,
)  # fmt: skip
assert template == tokenizer.chat_template
max_length = model.llm_engine.model_config.max_model_len
assert max_length == 4096


def score(context, continuation):
    context, continuation = tokenizer(context).input_ids, tokenizer(continuation).input_ids
    ids = (context + continuation)[-max_length:]
    params = SamplingParams(temperature=0, prompt_logprobs=1, max_tokens=1, detokenize=False)
    (output,) = model.generate([TokensPrompt(prompt_token_ids=ids)], sampling_params=params, use_tqdm=False,
                               lora_request=None)  # fmt: skip
    logprobs = [None] + [{i: getattr(x, "logprob", x) for i, x in at.items()} for at in output.prompt_logprobs[1:]]
    pairs = list(zip(ids, logprobs, strict=True))[len(context) :]
    return sum(at[i] for i, at in pairs), all(max(at, key=at.get) == i for i, at in pairs)


question = "<|im_start|>user\nWhat is 37 + 45?<|im_end|>\n<|im_start|>assistant\n"
answers = {answer: score(question, answer) for answer in ("82", "83", "Paris")}
assert answers["82"][1] and not answers["Paris"][1]
assert max(answers, key=lambda answer: answers[answer][0]) == "82"
assert -1 < answers["82"][0] < 0 and answers["Paris"][0] < -5, answers

# generate_until, with the token ids given the old way
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

# perplexity of texts given with their token ids; only each token's own log-probability
texts = ["The days are Monday, Tuesday, Wednesday, Thursday", "qzx vv Monday kkk Thursday"]
inputs = [{"prompt": text, "prompt_token_ids": tokenizer.encode(text)} for text in texts]
outputs = model.generate(inputs, SamplingParams(prompt_logprobs=0, max_tokens=1, temperature=0.0), use_tqdm=False)
losses = []
for text, given, output in zip(texts, inputs, outputs, strict=True):
    assert output.prompt == text and output.prompt_token_ids == given["prompt_token_ids"]
    logprobs = output.prompt_logprobs[1:]
    assert all(len(at) == 1 for at in logprobs)
    values = [at[i].logprob for at, i in zip(logprobs, output.prompt_token_ids[1:], strict=True)]
    losses.append(-np.mean(values))
assert 0 < losses[0] < losses[1], losses
old = model.generate(prompts=None, prompt_token_ids=[i["prompt_token_ids"] for i in inputs],
                     sampling_params=SamplingParams(prompt_logprobs=0, max_tokens=1, flat_logprobs=True))  # fmt: skip
assert old[0].prompt_logprobs.token_ids == inputs[0]["prompt_token_ids"][1:], "flat log-probabilities have columns"
position = inputs[0]["prompt_token_ids"][3]
assert old[0].prompt_logprobs[3][position].logprob == outputs[0].prompt_logprobs[3][position].logprob
destroy_model_parallel()
