"""Embeddings, their similarity, and a reranker in its original form, as vLLM's examples have them."""

import pickle
import sys

import torch
from vllm import LLM, EmbeddingRequestOutput, PoolingParams
from vllm.config import PoolerConfig
from vllm.outputs import PoolingRequestOutput

prompts = ["count to 5", "2 + 3", "spell cat"]
llm = LLM(model=sys.argv[1], runner="pooling", convert="embed", enforce_eager=True, max_model_len=256,
          pooler_config=PoolerConfig(pooling_type="LAST", normalize=True))  # fmt: skip
assert llm.llm_engine.model_config.runner_type == "pooling"
outputs = llm.embed(prompts, use_tqdm=False)
embeddings = torch.tensor([output.outputs.embedding for output in outputs])
assert isinstance(outputs[0], EmbeddingRequestOutput) and outputs[0].finished and outputs[0].prompt_token_ids
assert len(outputs[0].outputs.embedding) == outputs[0].outputs.hidden_size == embeddings.shape[1]
assert torch.allclose(embeddings.norm(dim=1), torch.ones(3))
assert pickle.loads(pickle.dumps(outputs[1])).outputs.embedding == outputs[1].outputs.embedding

(short,) = llm.embed("2 + 3", pooling_params=PoolingParams(dimensions=32), use_tqdm=False)
expected = embeddings[1, :32] / embeddings[1, :32].norm()
assert torch.allclose(torch.tensor(short.outputs.embedding), expected, atol=1e-5)
(raw,) = llm.encode("2 + 3", PoolingParams(use_activation=False), pooling_task="embed", use_tqdm=False)
assert isinstance(raw, PoolingRequestOutput) and raw.outputs.data.dtype == torch.float32
assert torch.allclose(raw.outputs.data / raw.outputs.data.norm(), embeddings[1], atol=1e-5)

scores = [output.outputs.score for output in llm.score("2 + 3", prompts, use_tqdm=False)]
assert torch.allclose(torch.tensor(scores), embeddings @ embeddings[1], atol=1e-5)
pairs = [output.outputs.score for output in llm.score(prompts, prompts[::-1], use_tqdm=False)]
assert torch.allclose(torch.tensor(pairs), (embeddings * embeddings.flip(0)).sum(1), atol=1e-5)
(text,) = llm.generate("2 + 3", use_tqdm=False)
assert text.finished
del llm

reranker = LLM(model=sys.argv[1], runner="pooling", max_model_len=256, hf_overrides={
    "architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["0", "1"],
    "is_original_qwen3_reranker": True,
})  # fmt: skip
outputs = reranker.score("is 2 + 3 = 5?", ["yes", "no", "a cat"], use_tqdm=False)
assert [output.prompt for output in outputs] == [f"is 2 + 3 = 5?{text}" for text in ("yes", "no", "a cat")]
assert len({output.outputs.score for output in outputs}) == 3
assert all(0 < output.outputs.score < 1 for output in outputs)
