# /// script
# requires-python = ">=3.10"
# dependencies = ["nanovllm", "lm-eval>=0.4.13"]
# tool.uv.sources.nanovllm = { path = "..", editable = true }
# ///
"""Evaluates the demo model on a small task with lm-evaluation-harness, offline.

    pip install '.[eval]' && python examples/evaluation.py

For real tasks the harness's own command line does:

    python -m nanovllm.integrations.lm_eval run --model nanovllm --model_args pretrained=Qwen/Qwen3-0.6B --tasks gsm8k
"""

import json
import os
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")

import lm_eval
from lm_eval.tasks import TaskManager

from nanovllm.integrations.lm_eval import NanoVLLM

TASK = """
task: sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 8}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""

if __name__ == "__main__":
    folder = Path(tempfile.mkdtemp())
    docs = [{"question": f"what is {a} + {b}", "answer": str(a + b)} for a in range(10) for b in range(10)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    (folder / "sums.yaml").write_text(TASK.format(data=folder / "sums.jsonl"))
    results = lm_eval.simple_evaluate(
        NanoVLLM(device="cpu"), tasks=["sums"], apply_chat_template=True, bootstrap_iters=0,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
    )  # fmt: skip
    print(f"exact match on sums: {results['results']['sums']['exact_match,none']:.3f}")
