"""Batch inference of a training framework: dictionaries with empty multi-modal data, the tokenizer's ids to stop at."""

import sys

from transformers import AutoTokenizer
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest  # noqa: F401

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
engine_args = {
    "model": sys.argv[1], "trust_remote_code": True, "dtype": "half", "max_model_len": 256 + 128,
    "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "disable_log_stats": True, "enable_lora": False,
    "limit_mm_per_prompt": {"image": 4, "video": 2},
}  # fmt: skip
llm = LLM(**engine_args)
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
