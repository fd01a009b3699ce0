"""Wrappers that ask which parameters and keywords exist, and fill in what they know."""

import inspect
import sys

from vllm import LLM, EngineArgs, SamplingParams
from vllm.sampling_params import RepetitionDetectionParams

defaults = {
    "n": 1, "best_of": None, "max_tokens": 8, "top_k": -1, "top_p": 1.0, "temperature": 0.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0, "stop": None, "ignore_eos": False, "use_beam_search": False, "logprobs": None,
    "not_a_parameter": 1,
}  # fmt: skip
known = {name: value for name, value in defaults.items() if name in SamplingParams.__annotations__}
assert "not_a_parameter" not in known and {"n", "stop", "logprobs", "presence_penalty"} <= set(known)
assert set(SamplingParams.__struct_fields__) >= {"temperature", "structured_outputs", "logits_processors"}
assert all(hasattr(SamplingParams(), name) for name in known)
wanted = {"model": sys.argv[1], "gpu_memory_utilization": 0.5, "swap_space": 0, "foo": 1, "enable_prefix_caching": True}
keywords = {name: value for name, value in wanted.items() if name in inspect.signature(EngineArgs).parameters}
assert set(keywords) == set(wanted) - {"foo"}
engine_args = EngineArgs(**keywords, reasoning_parser="granite",
                         override_generation_config={"temperature": 0.25, "max_new_tokens": 7})  # fmt: skip
assert engine_args.create_model_config().max_model_len == 4096
llm = LLM.from_engine_args(engine_args)
default = llm.get_default_sampling_params()
assert (default.temperature, default.max_tokens, default.top_p) == (0.25, 7, 1.0)
(output,) = llm.generate("<|im_start|>user\n2 + 3<|im_end|>\n<|im_start|>assistant\n", SamplingParams(**known))
assert (output.outputs[0].text, output.outputs[0].reasoning, output.outputs[0].content) == ("5", None, "5")
(output,) = llm.generate("Here is my thought process:", SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
assert (output.outputs[0].reasoning, output.outputs[0].content) == (output.outputs[0].text, "")
params = SamplingParams.from_optional(n=None, temperature=0.5, max_tokens=None, logit_bias={"7": 300.0}, stop="x")
assert (params.n, params.max_tokens, params.logit_bias, params.stop) == (1, None, {7: 100.0}, ["x"])
assert SamplingParams(3, seed=-1).n == 3 and SamplingParams(seed=-1).seed is None
loops = SamplingParams(temperature=0, max_tokens=40, logit_bias={19: 100.0})
loops.repetition_detection = RepetitionDetectionParams(max_pattern_size=2, min_count=3)
(output,) = llm.generate("x", loops)
assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("111", "repetition_detected")
