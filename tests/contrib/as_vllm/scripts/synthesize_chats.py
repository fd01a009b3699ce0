"""Data synthesis and batch inference of a trainer: token ids to stop at, empty multi-modal data, an own tokenizer."""

import sys

from transformers import AutoTokenizer
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest  # noqa: F401

llm = LLM(
    model=sys.argv[1], dtype="half", trust_remote_code=True, gpu_memory_utilization=0.9, max_model_len=512,
    swap_space=2.0, tensor_parallel_size=1, seed=None, enable_prefix_caching=True, quantization=None,
    tokenizer=sys.argv[1], tokenizer_mode="auto", skip_tokenizer_init=False, enforce_eager=False,
    pipeline_parallel_size=1, disable_log_stats=True, enable_lora=False, limit_mm_per_prompt={"image": 4, "video": 2},
)  # fmt: skip
params = SamplingParams(
    n=5, temperature=1.0, top_p=0.9, max_tokens=64, skip_special_tokens=False, stop=["\n"],
    stop_token_ids=[0, 2], logits_processors=None, spaces_between_special_tokens=False, min_tokens=1,
)  # fmt: skip
output_list = llm.generate("<|im_start|>user\n", params)
instructions = [completion.text.strip() for completion in output_list[0].outputs]
assert len(instructions) == 5 and all("\n" not in text and "<|im_end|>" not in text for text in instructions)

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
params = SamplingParams(
    repetition_penalty=1.0, temperature=0.95, top_p=0.7, top_k=50, stop_token_ids=[tokenizer.eos_token_id],
    max_tokens=128, skip_special_tokens=True, seed=None,
)  # fmt: skip
questions = ["spell banana", "number of days in June", "What is the month before March?"]
inputs = [
    {"prompt_token_ids": tokenizer.apply_chat_template([{"role": "user", "content": q}], add_generation_prompt=True,
                                                       return_dict=False), "multi_modal_data": None}
    for q in questions
]  # fmt: skip
results = llm.generate(inputs, params, lora_request=None)
preds = [result.outputs[0].text for result in results]
assert preds == ["b-a-n-a-n-a", "30", "February"], preds

tokenizer.chat_template = "{% for m in messages %}<|im_start|>user\n{{ m.content }}<|im_end|>\n{% endfor %}" \
                          "<|im_start|>assistant\n"  # fmt: skip
llm.set_tokenizer(tokenizer)
assert llm.get_tokenizer().chat_template == tokenizer.chat_template
params = SamplingParams(temperature=0, max_tokens=64, logits_processors=[], presence_penalty=0.0, frequency_penalty=0.0)
outputs = llm.chat([[{"role": "user", "content": "What is the capital of France?"}]], params, use_tqdm=False)
assert outputs[0].outputs[0].text.strip() == "Paris"

# a conversation of OpenAI's format: the arguments of a tool call are JSON text, which templates take as objects
tokenizer.chat_template = (
    "{% for m in messages %}{{ m.role }}:{% for call in m.tool_calls or [] %}{{ call.function.name }}"
    "{% for name, value in call.function.arguments.items() %} {{ name }}={{ value | tojson }}{% endfor %}{% endfor %}"
    "{{ m.content or '' }}\n{% endfor %}"
)
llm.set_tokenizer(tokenizer)
calls = [{"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": [2, 3], "b": null}'}},
         {"id": "2", "type": "function", "function": {"name": "now", "arguments": ""}}]  # fmt: skip
conversation = [{"role": "user", "content": "2 + 3"}, {"role": "assistant", "content": None, "tool_calls": calls},
                {"role": "tool", "tool_call_id": "1", "content": "5"}]  # fmt: skip
(output,) = llm.chat(conversation, params, use_tqdm=False)
assert output.prompt == "user:2 + 3\nassistant:add a=[2, 3] b=nullnow\ntool:5\n"
assert conversation[1]["tool_calls"][0]["function"]["arguments"] == '{"a": [2, 3], "b": null}'
calls[0]["function"]["arguments"] = "{a: 2}"
try:
    llm.chat([conversation], params, use_tqdm=False)
except ValueError as error:
    assert "arguments of the tool call of 'add' must be an object, or its JSON text, not '{a: 2}'" in str(error)
else:
    raise AssertionError("not refused")
