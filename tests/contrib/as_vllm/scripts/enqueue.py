"""Requests queued in several calls and completed in one; the engine's metrics; keywords of the newest version."""

import sys
import tempfile

from vllm import LLM, RequestOutput, SamplingParams
from vllm.config import AttentionConfig
from vllm.entrypoints.chat_utils import load_chat_template
from vllm.v1.metrics.reader import Counter, Gauge, Histogram, Vector

KV_CACHE_BYTES = 100 << 20
TEMPLATE = "{% for m in messages %}{{ m.content }} = {% endfor %}"
llm = LLM(
    model=sys.argv[1], dtype="float32", max_num_seqs=4, language_model_only=True, performance_mode="throughput",
    moe_backend="triton", attention_config=AttentionConfig(backend="FLASH_ATTN"), cudagraph_capture_sizes=[1, 2, 4],
    log_level="error", stream_interval=1, disable_log_stats=False, kv_cache_memory_bytes=KV_CACHE_BYTES,
    spec_method="ngram", spec_tokens=3, chat_template=TEMPLATE, linear_backend="auto", logging_config={"level": "info"},
)  # fmt: skip
assert 0.9 * KV_CACHE_BYTES < llm.llm_engine.awake().model_runner.kv_cache.nbytes <= KV_CACHE_BYTES
assert llm.get_world_size() == llm.get_world_size(include_dp=False) == 1

greedy = SamplingParams(temperature=0, max_tokens=30, stream_interval=4, watermarking=None)
prompts = ["count to 30", {"prompt_token_ids": [5, 6, 7]}, "one two three one two three one two"]
params = [greedy, SamplingParams(temperature=0, max_tokens=7, ignore_eos=True, logprobs=1, flat_logprobs=True), greedy]
chats = [[{"role": "user", "content": f"{i} + 3"}] for i in range(3)]
ids = llm.enqueue(prompts, params) + llm.enqueue_chat(chats, greedy, use_tqdm=False) + llm.enqueue("count to 9", greedy)
ids += llm.enqueue_chat(chats[0], greedy)
assert len(set(ids)) == len(ids) == 8 and all(isinstance(i, str) for i in ids)
llm.llm_engine.add_request("8", "aborted", greedy)
ids += llm.enqueue(["count to 5"], [greedy])  # not "8"
llm.llm_engine.abort_request("8")
assert llm.llm_engine.get_num_unfinished_requests() == len(set(ids)) == 9
outputs = llm.wait_for_completion(RequestOutput, use_tqdm=False)
assert [output.request_id for output in outputs] == ids and not llm.llm_engine.has_unfinished_requests()
expected = [
    *llm.generate(prompts, params, use_tqdm=False), *llm.chat(chats, greedy, use_tqdm=False),
    *llm.generate("count to 9", greedy, use_tqdm=False), *llm.chat(chats[0], greedy, use_tqdm=False),
    *llm.generate(["count to 5"], greedy, use_tqdm=False),
]  # fmt: skip
for output, other in zip(outputs, expected, strict=True):
    assert output.outputs == other.outputs and output.prompt == other.prompt
assert len(outputs[1].outputs[0].logprobs.start_indices) == 7
assert [output.prompt for output in outputs[3:6]] == ["0 + 3 = ", "1 + 3 = ", "2 + 3 = "]
with tempfile.NamedTemporaryFile("w", suffix=".jinja") as file:
    file.write(TEMPLATE)
    file.flush()
    assert load_chat_template(file.name) == load_chat_template(TEMPLATE) == TEMPLATE

metrics = {}
for metric in llm.get_metrics():
    assert metric.name.startswith("vllm:") and metric.labels["engine"] == "0"
    metrics.setdefault(metric.name, []).append(metric)
(generated,) = metrics["vllm:generation_tokens"]
assert isinstance(generated, Counter) and generated.value == 2 * sum(len(o.outputs[0].token_ids) for o in outputs)
(latency,) = metrics["vllm:e2e_request_latency_seconds"]
assert isinstance(latency, Histogram) and latency.count == latency.buckets["+Inf"] == 18 and latency.sum > 0
(running,) = metrics["vllm:num_requests_running"]
assert isinstance(running, Gauge) and running.value == 0
ends = {metric.labels["finished_reason"]: metric.value for metric in metrics["vllm:request_success"]}
assert ends["stop"] + ends["length"] == 18
(accepted,) = metrics["vllm:spec_decode_num_accepted_tokens_per_pos"]
assert isinstance(accepted, Vector) and len(accepted.values) >= 3
