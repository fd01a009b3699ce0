"""A longer context by overrides of the model's configuration."""

import sys

from vllm import LLM, SamplingParams

rope = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4096}
llm = LLM(model=sys.argv[1], hf_overrides={"rope_scaling": rope, "max_position_embeddings": 8192}, seed=0)
assert llm.llm_engine.model_config.max_model_len == 8192
assert llm.llm_engine.model_config.hf_config.max_position_embeddings == 8192
ids = llm.get_tokenizer().encode("count to 9, ") * 1000
(output,) = llm.generate({"prompt_token_ids": ids[:4200]}, SamplingParams(max_tokens=2, ignore_eos=True))
assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 4202
