"""What cannot be honoured is refused with its name; what is missing cannot be imported."""

import sys

import pytest
import torch
import vllm
from vllm import LLM, ModelRegistry, PoolingParams, SamplingParams
from vllm.config import PoolerConfig
from vllm.config.speculative import SpeculativeConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform

for used, said in [
    (get_tensor_model_parallel_rank, r"parallel_rank is not supported by nanovllm, which stands in for vLLM here\.$"),
    (lambda: ModelRegistry.register_model("Mine", object), "ModelRegistry is not supported .* leave the regist"),
    (SpeculativeConfig, r"SpeculativeConfig is not .* LLM\(speculative_config=\{'method': 'ngram'\}\), a dictionary"),
]:
    with pytest.raises(RuntimeError, match=said):
        used()
with pytest.raises(ValueError, match=r"generate: guided_options_request='x' is not supported by nanovllm"):
    LLM.generate(None, "x", guided_options_request="x")

with pytest.raises(ValueError, match=r"quantization='awq' names the quantization of a checkpoint, and .* has none"):
    LLM(model=sys.argv[1], quantization="awq")
with pytest.raises(ValueError, match=r"quantization='bitsandbytes' is not supported; .*, 'awq',.* or the 16-bit one"):
    LLM(model=sys.argv[1], quantization="bitsandbytes")
with pytest.raises(ValueError, match=r"no option 'quantisation'\. Did you mean 'quantization'\?"):
    LLM(model=sys.argv[1], quantisation=None)
with pytest.raises(ValueError, match=r"reasoning_parser='qwen4' is not supported; allowed are deepseek_r1, "):
    LLM(model=sys.argv[1], reasoning_parser="qwen4")
with pytest.raises(ValueError, match=r"pipeline_parallel_size=2 is not supported; nanovllm allows 1\."):
    LLM(model=sys.argv[1], pipeline_parallel_size=2)
for keywords, said in [
    ({"spec_method": "eagle3", "spec_model": "a/b"}, r"spec_method='eagle3', spec_model='a/b' is not supported"),
    ({"spec_tokens": 3}, r"spec_tokens=3 is not supported; nanovllm allows None, or the method 'ngram' or 'suffix'\."),
    ({"spec_method": "ngram", "speculative_config": {"method": "suffix"}}, r"gives 'method' twice; leave out spec_m"),
    ({"kv_cache_memory_bytes": 1000}, r"kv_cache_memory_bytes=1000 must be an integer of at least \d+, the bytes of"),
    ({"kv_cache_memory_bytes": "8G"}, r"kv_cache_memory_bytes='8G' must be an integer"),
    ({"chat_template": "none/such.jinja"}, r"chat_template='none/such\.jinja' is neither a template nor a file"),
    ({"device_ids": [1]}, r"device_ids=\[1\] is not supported; nanovllm allows None\."),
    ({"enable_expert_parallel": True}, r"enable_expert_parallel=True is not supported"),
]:
    with pytest.raises(ValueError, match=said):
        LLM(model=sys.argv[1], **keywords)
with pytest.raises(ImportError, match="'NoSuchName' from 'vllm'"):
    from vllm import NoSuchName  # noqa: F401
with pytest.raises(ModuleNotFoundError, match=r"stands in for vLLM here, has no module 'vllm\.utils\.such'"):
    import vllm.utils.such
with pytest.raises(AttributeError, match="'no_such_name'"):
    vllm.no_such_name  # noqa: B018
with pytest.raises(TypeError, match="temprature"):
    SamplingParams(temprature=0)
with pytest.raises(ValueError, match=r"best_of=3 is not supported; allowed: None, 1 or n\."):
    SamplingParams(best_of=3)
with pytest.raises(ValueError, match=r"max_tokens=0 must be an integer >= 1 or None\."):
    SamplingParams(max_tokens=0)
for name, value in [("watermarking", True), ("prompt_logprob_start", 3), ("trace_decode_token_ids", [5])]:
    with pytest.raises(ValueError, match=rf"SamplingParams: {name}=.* is not supported; allowed: (None|0), "):
        SamplingParams(**{name: value})
with pytest.raises(ValueError, match=r"top_p=1\.5"):
    SamplingParams(top_p=1.5)
assert current_platform.is_cuda() != current_platform.is_cpu() and not current_platform.is_rocm()

llm = LLM(model=sys.argv[1])
with pytest.raises(ValueError, match=r"lora_request=.* needs LLM\(enable_lora=True\)"):
    llm.generate("x", lora_request=LoRARequest("adapter", 1, "/path"))
with pytest.raises(ValueError, match="a prompt dictionary cannot have 'multi_modal_data'"):
    llm.generate({"prompt": "x", "multi_modal_data": {"image": 1}})
with pytest.raises(ValueError, match="a prompt with 'prompt_embeds' is not supported"):  # a tensor has no truth value
    llm.generate({"prompt_embeds": torch.zeros(3, 8)})
with pytest.raises(ValueError, match="3 prompts but 2 sampling_params"):
    llm.enqueue(["x", "y", "z"], [SamplingParams()] * 2)
with pytest.raises(ValueError, match=r"the prompt has \d+ tokens"):
    llm.enqueue(["x", [5] * 5000])
assert llm.wait_for_completion() == []  # nothing of a refused call is queued
with pytest.raises(ValueError, match="start_profile: delay_iterations=3 is not supported"):
    llm.start_profile(delay_iterations=3)
with pytest.raises(RuntimeError, match="reward of vLLM"):
    llm.reward("x")
with pytest.raises(ValueError, match="this model has no classification head"):
    llm.classify("x")
with pytest.raises(ValueError, match=r"PoolingParams\(truncate_prompt_tokens=3\) is not supported"):
    llm.embed("x", pooling_params=PoolingParams(truncate_prompt_tokens=3))
with pytest.raises(ValueError, match=r"PoolingParams\(extra_kwargs=\{'a': 1\}\) is not supported"):
    llm.embed("x", pooling_params=PoolingParams(extra_kwargs={"a": 1}, requires_token_ids=False))
with pytest.raises(ValueError, match="pooling_task='token_embed' is not supported"):
    llm.encode("x", pooling_task="token_embed")
with pytest.raises(ValueError, match=r"embed: tokenization_kwargs=\{'truncation': True\} is not supported"):
    llm.embed("x", tokenization_kwargs={"truncation": True})
with pytest.raises(ValueError, match=r"pooling_type='MEAN' is not supported; this checkpoint has 'last'\."):
    LLM(model=sys.argv[1], pooler_config=PoolerConfig(pooling_type="MEAN"))
with pytest.raises(ValueError, match="add_generation_prompt"):
    llm.chat([{"role": "user", "content": "x"}], continue_final_message=True)
llm.sleep(level=1)
with pytest.raises(RuntimeError, match=r"the engine sleeps .*call wake_up\(\) first"):
    llm.generate("x")
llm.wake_up()
with pytest.raises(ValueError, match=r"level=3 must be 0, 1 or 2"):
    llm.sleep(level=3)
with pytest.raises(ValueError, match=r"tensor 'model\.nothing' is twice there, or unknown to the model"):
    llm.apply_model(lambda model: model.load_weights([("model.nothing", torch.zeros(1))]))
params = SamplingParams()
params.temperature = -1
with pytest.raises(ValueError, match="temperature=-1"):
    llm.generate("x", params)
assert llm.generate("x", SamplingParams(), priority=[0], use_tqdm=False)[0].finished
