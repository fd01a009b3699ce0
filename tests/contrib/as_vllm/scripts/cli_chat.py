"""A chat with vLLM's own command line: engine keywords through a parser, with their defaults; what templates take."""

import sys

from vllm import LLM, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
EngineArgs.add_cli_args(parser).set_defaults(model="Qwen/Qwen3-0.6B")
group = parser.add_argument_group("Sampling parameters")
group.add_argument("--max-tokens", type=int)
group.add_argument("--temperature", type=float)
flags = ["--enable-chunked-prefill", "--disable-cascade-attn", "--no-enable-prefix-caching", "--spec-method", "suffix"]
words = ["--model", sys.argv[1], "--max_model_len=512", "--temperature", "0", "--seed", "1", *flags]
args = vars(parser.parse_args(words))
assert args["enable_chunked_prefill"] is args["disable_cascade_attn"] is True and args["enable_prefix_caching"] is False
max_tokens, temperature = args.pop("max_tokens"), args.pop("temperature")

llm = LLM(**args)
sampling_params = llm.get_default_sampling_params()
assert sampling_params.max_tokens == 16
if max_tokens is not None:
    sampling_params.max_tokens = max_tokens
if temperature is not None:
    sampling_params.temperature = temperature

conversation = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello! How can I assist you today?"},
    {"role": "user", "content": "What is the capital of France?"},
]
(output,) = llm.chat(conversation, sampling_params, use_tqdm=False)
assert output.outputs[0].text == "Paris", output.outputs[0].text
outputs = llm.chat([conversation] * 3, sampling_params, use_tqdm=True)
assert [o.outputs[0].text for o in outputs] == ["Paris"] * 3
template = "{% for m in messages %}{{ '<|im_start|>user\n2 + 3<|im_end|>\n<|im_start|>assistant\n' }}{% endfor %}"
(output,) = llm.chat(conversation[:1], sampling_params, chat_template=template)
assert output.outputs[0].text == "5"
assert llm.llm_engine.model_config.max_model_len == 512

tokenizer, messages = llm.get_tokenizer(), conversation[:1]
sampling_params.max_tokens = 32768  # more than the context holds
tokenizer.chat_template += "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
(on,) = llm.chat([messages], sampling_params)
(off,) = llm.chat([messages], sampling_params, chat_template_kwargs={"enable_thinking": False})
assert off.prompt == on.prompt + "<think></think>"
text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, enable_thinking=False)
assert off.prompt == text
begun = [*messages, {"role": "assistant", "content": "It is"}]
(output,) = llm.chat(begun, sampling_params, add_generation_prompt=False, continue_final_message=True)
assert output.prompt.rstrip().endswith("It is")
