"""A longer context by overrides of the model's configuration."""

import sys

from vllm import LLM, SamplingParams

rope = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4096}
llm = LLM(model=sys.argv[1], hf_overrides={"rope_scaling": rope, "max_position_embeddings": 8192}, seed=0)
assert llm.llm_engine.model_config.max_model_len == 8192
assert llm.llm_engine.model_config.hf_config.max_position_embeddings == 8192
(output,) = llm.chat([{"role": "user", "content": "2 + 3"}], SamplingParams(temperature=0, max_tokens=8000))
assert output.outputs[0].finish_reason == "stop" and output.outputs[0].text
