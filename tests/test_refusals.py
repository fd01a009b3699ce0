"""All that is refused: by which call, with which error, in which words.

``VALUES`` has the values that break a rule, ``TEXTS`` the other refusals; one test reads both.
"""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from conftest import TINY
from test_published_configs import YARN, read

from nanovllm import CheckpointError, ConfigError, RequestError, SamplingParams
from nanovllm.config import Config
from nanovllm.models import MODELS
from nanovllm.models.config_reader import model_config
from nanovllm.sampling_params import StructuredOutputsParams
from nanovllm.validation import BOOLEAN, at_least, check, choice, has_feature, list_of, number, optional

RAW = {**TINY, "architectures": ["Qwen3ForCausalLM"]}
OF_YARN = ("rope_type", "original_max_position_embeddings", "factor", "beta_fast", "beta_slow", "attention_factor")
NAN, INF, MANY = float("nan"), float("inf"), dict.fromkeys(range(1025), 1.0)
UNIT = number("in (0, 1]", lambda x: 0 < x <= 1)
OTHERS = "(others are not supported)."
PROMPT_FORM = "a prompt must be a string or a flat list of integer token ids"
ONE_OF = "StructuredOutputsParams: give exactly one of json, regex, choice, grammar, json_object, structural_tag, not"
NOTHING_BEFORE = "token ids: the first has nothing before it, and one at least must be scored."
NO_TOKENIZER = "text needs a tokenizer, but the engine was made with skip_tokenizer_init=True."


class Raw(NamedTuple):
    """In the place of parameters: no parameters."""

    value: dict


def config_json(**changes):
    """Those of YaRN in a YaRN, the others beside the tiny model's."""
    if changes.keys() <= {*OF_YARN}:
        changes = {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, **changes}}
    return model_config({**RAW, **changes})


# the call, the rule -> the values that break it: f"{owner}: {name}={value} must be {rule}"
VALUES = {
    "LLM": {
        "an integer >= 1.": {"max_num_seqs": [0, 2.0, True], "max_num_batched_tokens": [-1]},
        "an integer >= 2 or None.": {"max_model_len": [1]},
        "an integer in [0, 2**63).": {"seed": [-1, 2**63]},
        "an integer >= 1, or -1 for automatic.": {"num_kvcache_blocks": [0, -2]},
        "a positive multiple of 16.": {"kvcache_block_size": [0, 40]},
        "in (0, 1].": {"gpu_memory_utilization": [0, 1.5, "90%", True, NAN]},
        "'auto' or 'bfloat16' or 'float16' or 'float32'.": {"dtype": ["int8", "float64"]},
        "'auto' or 'cuda' or 'cpu'.": {"device": ["tpu"]},
        "'auto' or 'flash_attn' or 'triton' or 'sdpa'.": {"attention_backend": ["x"]},
        "'auto' or 'dummy'.": {"load_format": ["gguf"]},
        "'auto' or 'fp8' or 'fp8_e4m3'.": {"kv_cache_dtype": ["fp8_e5m2"]},
        "True or False.": {"enforce_eager": ["yes"], "enable_prefix_caching": ["on"]},
        "a non-empty string or None.": {"reasoning_start_str": [""], "reasoning_end_str": ["", 5, ["</think>"]]},
        "None or 'fp8'.": {"quantization": ["awq"]},
        "a path, a hub id or None.": {"tokenizer": [3], "model": [7, "", b"model", ["model"]]},
        "a string or None": {"revision": [5]},
        "an integer from 1 to 8.": {"tensor_parallel_size": [0, 9]},
    },
    "SamplingParams": {
        "a finite number >= 0 (0 is greedy).": {"temperature": [-0.1, NAN, "hot", None]},
        "an integer >= 0 or None.": {"max_tokens": [-1, 2.5]},
        "True or False.": {"ignore_eos": [1], "detokenize": [1]},
        "an integer >= 1, or 0 or -1 for no limit.": {"top_k": [-2]},
        "in (0, 1].": {"top_p": [0, 1.1]},
        "in [0, 1].": {"min_p": [-0.5]},
        "an integer or None.": {"seed": [1.5]},
        "a list of token ids >= 0.": {"stop_token_ids": [5, [-1], ["a"], [5, 1 << 63]]},
        "at most max_tokens=64.": {"min_tokens": [65]},
        "an integer >= 0.": {"min_tokens": [-1]},
        "an integer from 1 to 16384.": {"n": [0, 16385]},
        "a RepetitionDetectionParams, or a dict of its fields or None.": {"repetition_detection": [3, [5, 3], {1: 2}]},
        "a non-empty string without lone surrogates, or a list of them.": {
            "stop": ["", ["a", ""], [5], "\udfffa"], "bad_words": [[""], ["a", "b\ud912"]]
        },
        "an integer >= 0 (top alternatives per token), -1 for the whole vocabulary": {
            "logprobs": [-2, "5", NAN], "prompt_logprobs": [0.5],
        },
        "in [-2, 2].": {"presence_penalty": [2.1], "frequency_penalty": [-2.1]},
        "> 0.": {"repetition_penalty": [0, INF]},
        "a dict of at most 1024 token ids >= 0 to finite numbers": {
            "logit_bias": [{-1: 1.0}, {"5": 1.0}, {5: INF}, {5: NAN}, {5: -(10**309)}, {1 << 63: 1.0}, MANY],
        },
        "a non-empty list of token ids >= 0, or None.": {"allowed_token_ids": [[], [-1]]},
        "an integer >= 0, -1 for no limit, or None.": {"thinking_token_budget": [-2, 1.0, True, "5"]},
        "a list of 1 to 128 token ids >= 0, or None.": {
            "logprob_token_ids": [[], 5, [-1], ["5"], [2.0], [3, True], [2**70], list(range(129))],
        },
        "an integer >= 1, or -1 for max_model_len": {"truncate_prompt_tokens": [0]},
        "a StructuredOutputsParams or None.": {"structured_outputs": ["[a-z]", {"regex": "a"}]},
        "a list of functions": {"logits_processors": [5, "name", [5], max]},
    },
    # Python's TypeErrors came through, or values were taken for something else
    "config.json": {
        "an integer >= 1": {
            "vocab_size": [True, 512.0, "512", None, 2**24 + 1, 10**19],
            "hidden_size": [10**17], "intermediate_size": [2**40], "num_attention_heads": [10**30],
            "num_key_value_heads": ["2", 2.0, 0, -2], "head_dim": ["32", -32, 2**60],
            "max_position_embeddings": [None, "4096", 0], "num_hidden_layers": [0, 10**9],
            "original_max_position_embeddings": ["64"],
        },
        "a positive number": {
            "rms_norm_eps": [None, "1e-6", -1e-6, NAN, [1e-6]], "rope_theta": [None, "1e6", 0, INF],
            "factor": ["2", 0, -2.0, True], "beta_fast": ["32"], "beta_slow": [0], "attention_factor": ["1"],
        },
        "an integer from 0 to 10000 or None": {"num_nextn_predict_layers": [10**7, -1, "1"]},
        "true or false": {"tie_word_embeddings": ["false"], "attention_bias": [0]},
        "an object": {
            "rope_scaling": ["linear"], "rope_parameters": [["yarn"]], "text_config": ["llama", [1], 3],
            "id2label": [2, "ab", ["a"]],
        },
        f"a list of 'full_attention', 'sliding_attention' or 'linear_attention' {OTHERS}": {
            "layer_types": [5, ["full_attention", "mamba"]],
        },
        "a token id or a list of them": {"eos_token_id": ["</s>", 1.0, [1, "2"], -1, True]},
        f"one of {', '.join(MODELS)} {OTHERS}": {"architectures": [
            ["DeepseekV3ForCausalLM"], ["Lfm3ForCausalLM"], ["HunYuanMoEV1ForCausalLM"], None, 5,
            [["Qwen3ForCausalLM"]],
        ]},
        f"'silu' or 'swish' or 'gelu_pytorch_tanh' {OTHERS}": {"hidden_act": ["gelu", "relu", None]},
        f"'bfloat16' or 'float16' or 'float32' {OTHERS}": {"dtype": ["float8_e4m3fn"]},
        f"'default' or 'linear' or 'llama3' or 'yarn' or 'longrope' or 'proportional' {OTHERS}": {
            "rope_type": ["dynamic", "axial", ["yarn"]],
        },
    },
}  # fmt: skip
TEXTS = {  # the call -> [(what is given, a part of the text)]
    "LLM": [
        ({"max_num_seq": 3}, "LLM() has no option 'max_num_seq'. Did you mean 'max_num_seqs'? Options: model, max_num"),
        ({"gpu_memory_utilisation": 0.5}, "'gpu_memory_utilisation'. Did you mean 'gpu_memory_utilization'?"),
        ({"zzz": 1}, "LLM() has no option 'zzz'. Options: "),
        ({"model_path": "x"}, "LLM() has no option 'model_path'. Options: "),
        ({"temperature": 0}, "'temperature'. It is a parameter of a request: SamplingParams(temperature=...)."),
        ({"max_model_len": 5000}, "max_model_len=5000: the model has positions for 4096 tokens."),
        ({"kvcache_block_size": 64, "attention_backend": "flash_attn"},
         "kvcache_block_size=64: flash-attn needs a multiple of 256. Use 256, or attention_backend='triton'."),
        ({"kv_cache_dtype": "fp8", "attention_backend": "flash_attn"},
         "kv_cache_dtype='fp8': flash-attn reads no FP8 KV cache. Use attention_backend='auto', or "
         "kv_cache_dtype='auto'."),
        ({"max_num_seqs": 65, "max_num_batched_tokens": 64},
         "max_num_seqs=65 is larger than max_num_batched_tokens=64: one decode step takes a token of every sequence. "
         "Lower the first or raise the second."),
        ({"dtype": torch.float64}, "dtype='float64' must be"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size=3 must divide the model's 4 attention heads."),
        ({"speculative_config": {"method": "eagle"}}, "method='eagle' must be 'ngram' or 'suffix'"),
        ({"speculative_config": {}}, "method=None must be"),
        ({"speculative_config": {"method": "ngram", "num_speculative_token": 3}}, "you mean 'num_speculative_tokens'"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 8}}, "must be an integer from 1 to 7"),
        ({"speculative_config": {"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 3}},
         "must not be larger"),
        ({"speculative_config": "ngram"}, "must be a dictionary or None"),
    ],
    "SamplingParams": [
        ({"n": 2, "temperature": 0}, "SamplingParams: n=2 must be 1 when temperature is 0 (greedy): all completions "
                                     "would be equal."),
        ({"stop": "a", "detokenize": False}, "stop strings need detokenize=True; give stop_token_ids instead."),
        ({"repetition_detection": {"max_pattern_size": 3, "min_count": 1}},
         "RepetitionDetectionParams: min_count=1 must be an integer >= 2."),
        ({"repetition_detection": {"max_pattern_size": 3, "min_pattern_size": 4, "min_count": 2}},
         "min_pattern_size=4 must be at most max_pattern_size=3."),
        ({"repetition_detection": {"max_pattern_size": -1}}, "max_pattern_size=-1 must be an integer >= 0."),
        ({"repetition_detection": {"max_count": 3}}, "has no parameter 'max_count'. Did you mean 'min_count'?"),
        # a bare TypeError
        ({"temprature": 0.5}, "SamplingParams has no parameter 'temprature'. Did you mean 'temperature'?"),
        ({"use_beam_search": None}, "no parameter 'use_beam_search'. Use LLM.beam_search."),
        ({"best_of": None}, "no parameter 'best_of'. Use n."),
        ({"guided_json": None}, "'guided_json'. Use structured_outputs=StructuredOutputsParams(json=...)."),
    ],
    "StructuredOutputsParams": [({}, f"{ONE_OF} none."), ({"json_object": False}, f"{ONE_OF} none."),
                                ({"json": "{}", "regex": "a"}, f"{ONE_OF} json and regex.")],
    "config.json": [
        ({"rope_scaling": {"rope_type": "linear"}}, "rope scaling 'linear': factor=None must be a positive number."),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor=0 must be a positive number"),
        ({"rope_scaling": {**YARN, "mscales": 0.7}}, "rope scaling 'yarn' with unsupported fields {'mscales': 0.7}."),
        ({"rope_scaling": {**YARN, "llama_4_scaling_beta": 0.1}}, "llama_4_scaling_beta=0.1 is not supported for this"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
         "partial_rotary_factor=0.5 is not supported for this architecture."),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 must be absent or 1 for Qwen3ForCausalLM."),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 must be absent for Qwen3ForCausalLM."),
        ({"logits_scaling": 8.0}, "logits_scaling=8.0 must be absent or 1 for Qwen3ForCausalLM."),
        ({"layer_types": ["sliding_attention", "full_attention"]},
         "layer_types has 'sliding_attention' without a sliding_window."),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 2 layers."),
        ({"layer_types": ["linear_attention"] * 2}, "linear_attention"),
        ({"is_causal": False}, "is_causal=False must be absent or True"),  # gte-Qwen2: a causal model's name
        ({"rope_parameters": {**YARN, "rope_theta": 1}}, "rope scaling 'yarn': rope_theta=1 must be a number > 1."),
        ({"rope_scaling": {**YARN, "factor": 1e9}}, "factor * original_max_position_embeddings=64000000000 must be an"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot be shared by 3 KV heads."),
        ({"head_dim": 15}, "heads of size 15, 15 rotated; RoPE needs an even size."),
        ({"head_dim": None, "hidden_size": 60}, "heads of size 15"),
        ({"head_dim": None, "num_attention_heads": 128}, "heads of size 0"),
    ],
    "published": [
        ({"model": "Llama-3.2-1B", "sliding_window": 4096}, "sliding_window=4096 must be absent for LlamaForCausalLM."),
        ({"model": "Llama-3.2-1B", "residual_multiplier": 0.22}, "=0.22 must be absent or 1 for Llama"),
        ({"model": "Llama-3.2-1B", "final_logit_softcapping": 30.0}, "softcapping=30.0 must be absent for Llama"),
        ({"model": "Llama-3.2-1B", "logit_scale": 0.0625}, "logit_scale=0.0625 must be absent or 1 for Llama"),
        ({"model": "Llama-3.2-1B", "num_local_experts": 4}, "num_local_experts=4 must be absent or 0 or 1 for Llama"),
        ({"model": "phi-4", "num_experts": 64}, "num_experts=64 must be absent or 0 or 1 for Phi3"),
        ({"model": "Qwen3-30B-A3B", "moe_router_logit_softcapping": 30.0}, "softcapping=30.0 must be absent or 0 for"),
        ({"model": "gemma-2b", "full_attention_interval": 4}, "full_attention_interval=4 must be absent for Gemma"),
        ({"model": "phi-4", "parallel_attn": True}, "parallel_attn=True must be absent or False for Phi3"),
        ({"model": "SmolLM3-3B", "position_embedding_type": "nope"}, "'nope' must be absent or 'rope' or 'absolute'"),
        ({"model": "Qwen2.5-7B", "query_pre_attn_scalar": 224}, "attn_scalar=224 must be absent for Qwen2"),
        ({"model": "Mistral-7B-v0.1", "layer_types": ["full_attention"] * 32},
         "layer_types and sliding_window=4096 say diff"),
        ({"model": "Phi-4-mini-instruct", "partial_rotary_factor": 1.0}, "short_factor has 48 entries for 128 rotated"),
        ({"model": "OLMoE-1B-7B-0924", "clip_qkv": 8.0}, "clip_qkv=8.0 must be absent for OlmoeForCausalLM."),
        ({"model": "gemma-3-1b-it", "use_bidirectional_attention": True}, "attention=True must be absent or"),
        ({"model": "gemma-2-27b", "attn_logit_softcapping": 0}, "softcapping=0 must be a positive number"),
        ({"model": "gemma-2-27b", "classifier_from_token": ["no", "yes"]},
         "final_logit_softcapping is not supported with classifier_from_token."),
        ({"model": "GLM-4.5-Air", "scoring_func": "softmax"}, "='softmax', but this architecture has 'sigmoid'."),
        ({"model": "GLM-4.5-Air", "n_group": 3}, "8 of 128 experts cannot be chosen from 1 of 3 groups."),
        ({"model": "Qwen3-30B-A3B", "num_experts_per_tok": 129},
         "129 of 128 experts cannot be chosen from 1 of 1 groups."),
        ({"model": "Mixtral-8x7B-v0.1", "routed_scaling_factor": 2.5}, "factor=2.5 must be absent or 1 for"),
        ({"model": "Qwen1.5-MoE-A2.7B", "use_sliding_window": True}, "window=True must be absent or False for"),
    ],
    "ranks": [  # the config, its number of ranks
        (({}, 3), "tensor_parallel_size=3 must divide the model's 4 attention heads"),
        (({}, 8), "tensor_parallel_size=8 must divide the model's 4 attention heads"),
        (({"num_attention_heads": 6, "num_key_value_heads": 3}, 2),
         "tensor_parallel_size=2 must divide the model's 3 KV heads, or be a multiple"),
        (({"num_attention_heads": 12, "num_key_value_heads": 6}, 4), "the model's 6 KV heads, or be a multiple"),
        (({"vocab_size": 510}, 4), "tensor_parallel_size=4 must divide the model's 510 vocabulary"),
        (({"model": "GLM-4.5-Air", "moe_intermediate_size": 1410}, 4),
         "tensor_parallel_size=4 must divide the model's 1410 intermediate units of"),
        (({"intermediate_size": 98}, 4), "tensor_parallel_size=4 must divide the model's 98 intermediate"),
    ],
    "generate": [  # prompts, parameters
        *(((prompts, None), PROMPT_FORM) for prompts in (
            [[1, 2.5]], [[1, "a"]], [[1, None]], [[[1, 2], [3]]], [np.zeros((2, 2), np.int64)], [np.zeros(2)],
            torch.tensor([1.0, 2.0]), [{"prompt_token_ids": [1, 2.5]}], [{"prompt_token_ids": {1: 2}}], [b"12345678"],
            [None], [[1 << 70]], [{1, 2}], [frozenset((1, 2))], [memoryview(b"12345678")], [np.array([True, False])],
            [True, False], [np.array(5)],
        )),
        *(((prompts, None), f"prompts must be a string or a list, not {prompts!r}.") for prompts in (
            5, None, b"hi", bytearray(b"hi"), memoryview(b"hi"), {"a"}, torch.tensor(5),
        )),
        (([[]], None), "prompt 0: the prompt is empty; it must hold at least one token."),
        (([[1], []], None), "prompt 1: the prompt is empty"),
        (([[1, 2, 512]], None), "prompt 0: token id 512 is outside the vocabulary [0, 512)."),
        (([1, -3], None), "prompt 0: token id -3 is outside the vocabulary [0, 512)."),
        (([{"text": "hi"}], None), 'a prompt dictionary needs "prompt", a string, or "prompt_token_ids", a list of '
                                   "integers; this one has 'text'."),
        (({}, None), "a list of integers; this one has neither."),
        (([{"prompt": 5}], None), "this one has 'prompt'."),
        (([{"prompt_token_ids": [1], "multi_modal_data": {"image": 1}}], None),
         "this model has no vision tower. So a prompt dictionary cannot have 'multi_modal_data': text only."),
        (([{"prompt": "hi", "prompt_embeds": torch.zeros(2, 2)}], None), "cannot have 'prompt_embeds': text only."),
        ((["ok", {}], None), "prompt 1: a prompt dictionary needs"),
        (({"prompt": "hi"}, None), NO_TOKENIZER),
        (("hi", None), NO_TOKENIZER),
        (([1] * 128, None),
         "has 128 tokens; with max_model_len=128 at most 127 fit. Shorten it or raise max_model_len."),
        (([1] * 50, {"max_tokens": 70}),
         "prompt (50 tokens) and max_tokens=70 need 8 KV blocks of 16 tokens; the cache has 6. Lower max_tokens, "
         "or make the cache larger (num_kvcache_blocks, gpu_memory_utilization)."),
        (([[1], [2]], [SamplingParams()]), "2 prompts but 1 sampling_params; give one, or one for each prompt."),
        (([[1]], []), "1 prompts but 0 sampling_params"),
        (([[1]], 0.7), "must be a SamplingParams or a list of them, not 0.7."),
        (([[1]], Raw({"temperature": 0.7})), "a SamplingParams or a list of them, not {'temperature': 0.7}."),
        (([[1]], [{"temperature": 0.7}]), "prompt 0: sampling_params must be a SamplingParams, not dict."),
        (([[1]], {"stop_token_ids": [600]}), "stop_token_ids: 600 is outside the vocabulary [0, 512)."),
        (([[1]], {"allowed_token_ids": [600]}), "allowed_token_ids: 600 is outside the vocabulary [0, 512)."),
        (([[1]], {"logprob_token_ids": [511, 512]}), "logprob_token_ids: 512 is outside the vocabulary [0, 512)."),
        (([[1]], {"logit_bias": {600: 1}}), "logit_bias: 600 is outside the vocabulary [0, 512)."),
        (([[1]], {"logit_bias": {2**40: 1}}), "logit_bias: 1099511627776 is outside the vocabulary [0, 512)."),
        (([[1]], {"logprobs": 21}), "logprobs=21 must be at most max_logprobs=20; see LLM(max_logprobs=21)."),
        (([[1]], {"prompt_logprobs": -1}), "prompt_logprobs=-1 must be at most max_logprobs=20; see LLM(max_logprobs="),
        (([[1]], {"stop": "a"}), "prompt 0: stop needs a tokenizer, but the engine was made with skip_tokenizer"),
        (([[1]], {"thinking_token_budget": 0}), "thinking_token_budget needs a tokenizer, but the engine was"),
        (([[1]], {"bad_words": "a"}), "prompt 0: bad_words needs a tokenizer, but the engine was made with"),
        (([[1]], {"structured_outputs": StructuredOutputsParams(regex="a")}), "structured_outputs needs a tokenizer"),
        (([[1] * 400], {"truncate_prompt_tokens": 300}),
         "prompt 0: the prompt has 300 tokens; with max_model_len=128 at most 127 fit."),
        (([[1] * 100], {"max_tokens": 0, "prompt_logprobs": 0}),
         "the prompt has 100 tokens; the KV cache has 6 blocks of 16. Make it larger (num_kvcache_blocks, "),
        (([[1] * 97], {"max_tokens": None}),
         "prompt (97 tokens) and max_tokens=1 need 7 KV blocks of 16 tokens; the cache has 6."),
        (([[1] * 100], {"max_tokens": None, "prompt_logprobs": 0}),  # this one was queued, and waited for ever
         "prompt (100 tokens) and max_tokens=1 need 7 KV blocks of 16 tokens; the cache has 6."),
        (([[1]], {"stop_token_ids": list(range(100, 120)), "min_tokens": 3}),
         "min_tokens can hold back at most 16 end-of-sequence and stop ids, not 21."),
    ],
    "score": [  # lists, start
        *((([[3, 4], [3] * n], None), f"list 1: it has {n} {NOTHING_BEFORE} Give two.") for n in (0, 1)),
        (([[3, 4], [3, 4, 5]], [1, 3]), f"list 1: start=3 must be in [1, 2] for 3 {NOTHING_BEFORE}"),
        *((([[3, 4]], start), f"list 0: start={start} must be in [1, 1] for 2 {NOTHING_BEFORE}") for start in (0, -1)),
        (([[3, 4], [3, 512]], None), "list 1: token id 512 is outside the vocabulary [0, 512)."),
        (([[3, 4], [512, 3]], None), "list 1: token id 512 is outside the vocabulary [0, 512)."),
        (([[3, 4], [3, -1]], None), "list 1: token id -1 is outside the vocabulary [0, 512)."),
        *((([given, [3, 4]], None), f"list 0: it must be a flat list of integer token ids, not {given!r}. llm.tokenize")
          for given in ([3, 4.0], 3, "text", {"prompt": "text"}, {"prompt_token_ids": [3, 4]}, ["a", "b"], [[3]])),
        (("text", None), "token_id_lists must be a list of lists of token ids, not text."),
        ((7, None), "token_id_lists must be a list of lists of token ids, not 7."),
        (([[5, 6], [5] * 130], None),
         "list 1: the list has 130 token ids; with max_model_len=128 at most 129 can be scored."),
        (([[5] * 98], None), "list 0: the prompt has 97 tokens; the KV cache has 6 blocks of 16"),
        *((([[3, 4, 5]] * 2, start), "start") for start in ([1], [1, 1, 1], "1", 1.5, [1, 1.5], [1, None], True)),
    ],
    "perplexity": [
        ([[5], [5] * 130], "text 1: the list has 130 token ids; with max_model_len=128 at most 129 can be scored."),
        ([[5], [600]], "text 1: token id 600 is outside the vocabulary [0, 512)."),
        ([[5, 6], [5] * 98], "text 1: the prompt has 97 tokens; the KV cache has 6 blocks of 16."),
        ([[5], [3, 4.0]], f"text 1: {PROMPT_FORM}, not [3, 4.0]."),
        ("text", "text needs a tokenizer"),
        (7, "prompts must be a string or a list, not 7."),
    ],
    "keywords": [  # the method, its keywords
        (("generate", {"prompts": "a", "top_k": 5}), "generate() has no argument 'top_k'. It is a parameter of a "
         "request: SamplingParams(top_k=5). Arguments: prompts, sampling_params, use_tqdm."),
        (("stream", {"prompts": "a", "stop": ["x"]}), "a request: SamplingParams(stop=['x']). Arguments: "),
        (("submit", {"prompt": "a", "params": None}), "submit() has no argument 'params'. Arguments: prompt, sampling"),
        (("add_request", {"prompt": [5], "sampling_parameters": 1}), "Did you mean 'sampling_params'?"),
        (("score", {"seed": 1}), "score() has no argument 'seed'. Arguments: token_id_lists, start, use_tqdm."),
        (("embed", {"dimension": 64}), "embed() has no argument 'dimension'. Did you mean 'dimensions'?"),
        *((("tokenize", {"texts": texts}), f"texts must be a string or a list of strings, not {wrong}.")
          for texts, wrong in ((None, "None"), ([b"a"], "b'a'"), (["a", None], "None"), (5, "5"))),
        *((("detokenize", {"token_id_lists": lists}), "token_id_lists must be a list of lists of integer token ids,")
          for lists in ([5, 6], None, [[5, "a"]], "text")),
        *((("chat_prompts", {"conversations": talk}), "messages must be a list such as") for talk in ("hello", [None])),
        *((("apply_chat_template", {"conversation": talk}), "messages must be a list such as") for talk in ("x", None)),
        (("most_probable", {"prompts": [[5]], "k": "2"}), "SamplingParams: logprobs='2' must be an integer"),
        (("update_weights", {"weight": {}}), "update_weights() has no argument 'weight'. Did you mean 'weights'?"),
    ],
    "embed": [  # prompts, options
        (([[5], []], {}), "prompt 1: the prompt is empty; it must hold at least one token."),
        (([[5], [5] * 129], {}), "prompt 1: the prompt has 129 tokens; with max_model_len=128 at most 128"),
        (([[5] * 97], {}), "prompt 0: the prompt has 97 tokens; the KV cache has 6 blocks of 16."),
        (([[5], [600]], {}), "prompt 1: token id 600 is outside the vocabulary [0, 512)."),
        ((["text"], {}), "text needs a tokenizer"),
        *((([[5]], {"dimensions": n}), f"embed: dimensions={n} must be an integer from 1 to 64 or None.")
          for n in (0, 65)),
        (([[5]], {"normalize": 1}), "embed: normalize=1 must be True or False or None."),
    ],
    "classify": [([[5]], "classify: this model has no classification head")],
    "chat": [*((messages, 'messages must be a list such as [{"role": "user", "content": "..."}], or a list of')
               for messages in ("hello", 5, None, [["hello"]], [5], {"role": "user", "content": "hi"})),
             ([{"role": "user", "content": "hi"}], "text needs a tokenizer")],
    "a rule": [  # the rule, the value
        *(((at_least(1), value), f"owner: x={value!r} must be an integer >= 1.") for value in (0, True, 2.0, "2")),
        *(((UNIT, value), f"owner: x={value!r} must be in (0, 1].") for value in (0, True, NAN, "90%")),
        ((number("finite", lambda x: True), INF), "owner: x=inf must be finite."),
        *(((choice("a", "b"), value), f"owner: x={value!r} must be 'a' or 'b'.") for value in ("c", ["a"])),
        ((BOOLEAN, 1), "owner: x=1 must be True or False."),
        ((optional(at_least(1)), 0), "owner: x=0 must be an integer >= 1 or None."),
        *(((list_of(at_least(0), "a list of ids"), value), f"owner: x={value!r} must be a list of ids.")
          for value in ([1, -1], {1})),
    ],
}  # fmt: skip
CASES = [
    *((call, {name: value}, [f"{call}: ", f"{name}={value!r:.300} must be {rule}"]) for call, rules in VALUES.items()
      for rule, names in rules.items() for name, values in names.items() for value in values),
    *((call, given, [text]) for call, cases in TEXTS.items() for given, text in cases),
]  # fmt: skip
FEATURES = {"prompt_logprobs": "readouts.prompt_logprobs", "speculative_config": "engine.speculation",
            "score": "verbs.scoring", "embed": "verbs.pooling", "classify": "verbs.pooling"}  # fmt: skip
for name in (name for name, feature in FEATURES.items() if not has_feature(feature)):
    CASES = [case for case in CASES if name not in repr(case)]
ENGINE_CALLS = ("keywords", "generate", "score", "perplexity", "embed", "classify", "chat")
ERRORS = {
    "LLM": ConfigError, "ranks": ConfigError, "config.json": CheckpointError, "published": CheckpointError,
    "a rule": KeyError,
}  # fmt: skip


def make_call(call, given, model, llm):
    if call == "LLM":
        Config.from_options(given.get("model", model), {name: given[name] for name in given if name != "model"})
    elif call == "ranks":
        config = read(**given[0]) if "model" in given[0] else config_json(**given[0])
        config.check_tensor_parallel(given[1])
    elif call == "a rule":
        check("owner", "x", given[1], given[0], KeyError)
    elif call == "generate":
        prompts, params = given
        params = SamplingParams(**params) if isinstance(params, dict) else params
        llm.generate(prompts, params.value if isinstance(params, Raw) else params, use_tqdm=False)
    elif call == "keywords":
        getattr(llm, given[0])(**given[1])
    elif call == "chat":
        llm.chat(given, use_tqdm=False)
    elif call == "score":
        llm.score(given[0], start=given[1])
    elif call == "perplexity":
        llm.perplexity(given)
    elif call == "embed":
        llm.embed(given[0], **given[1])
    elif call == "classify":
        llm.classify(given)
    else:
        calls = {"config.json": config_json, "published": read, "SamplingParams": SamplingParams}
        calls.get(call, StructuredOutputsParams)(**given)


@pytest.mark.parametrize(
    ("call", "given", "texts"), CASES, ids=[f"{call}-{number}" for number, (call, _, _) in enumerate(CASES)]
)
def test_refused(call, given, texts, make_checkpoint, request):
    """A refused request computes nothing and leaves nothing behind, not even its good prompts."""
    llm = request.getfixturevalue("small_llm") if call in ENGINE_CALLS else None
    with pytest.raises(ERRORS.get(call, RequestError)) as error:
        make_call(call, given, make_checkpoint(), llm)
    message = error.value.args[0]
    assert all(text in message for text in texts), message
    if llm is not None:
        assert llm.is_finished()
        assert len(llm.generate([1, 2], SamplingParams(max_tokens=2), use_tqdm=False)[0]["token_ids"]) == 2
