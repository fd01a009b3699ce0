"""chat_template_kwargs reach the template."""

import sys

from vllm import LLM, SamplingParams

llm = LLM(model=sys.argv[1])
tokenizer = llm.get_tokenizer()
tokenizer.chat_template += "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
params = SamplingParams(temperature=0.6, top_p=0.95, top_k=20, max_tokens=32768)
messages = [{"role": "user", "content": "2 + 3"}]
(on,) = llm.chat([messages], params)
(off,) = llm.chat([messages], params, chat_template_kwargs={"enable_thinking": False})
assert off.prompt == on.prompt + "<think></think>"
text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, enable_thinking=False)
assert off.prompt == text
(output,) = llm.chat(
    [*messages, {"role": "assistant", "content": "It is"}], params, add_generation_prompt=False,
    continue_final_message=True,
)  # fmt: skip
assert output.prompt.rstrip().endswith("It is")
