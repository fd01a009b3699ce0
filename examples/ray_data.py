# /// script
# requires-python = ">=3.10"
# dependencies = ["nanovllm", "ray[data]>=2.59", "pyarrow>=17"]
# tool.uv.sources.nanovllm = { path = "..", editable = true }
# ///
"""A parquet file of prompts through a cluster: one engine per actor, and Ray hands them the rows.

    pip install '.[ray]' && python examples/ray_data.py

Without arguments two engines of the demo model answer 40 questions on this machine's CPU. For a million prompts on a
cluster's GPUs: model_source="Qwen/Qwen3-8B", engine_kwargs={"tensor_parallel_size": 2}, concurrency=32, and paths that
all nodes see.
"""

import os
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pyarrow as pa
import pyarrow.parquet as pq
import ray

from nanovllm.integrations.ray_data import ProcessorConfig, build_processor

if __name__ == "__main__":
    folder = tempfile.mkdtemp()
    questions = [f"what is {a} + {b}" for a in range(8) for b in range(5)]
    pq.write_table(pa.table({"question": questions}), f"{folder}/questions.parquet")

    # after a crash the same script goes on where it was, given a column of unique ids:
    # ray.data.DataContext.get_current().checkpoint_config = ray.data.checkpoint.CheckpointConfig("id", "/shared/...")
    ray.init(num_cpus=3, include_dashboard=False)  # on a cluster: ray.init(address="auto")
    processor = build_processor(
        ProcessorConfig(engine_kwargs={"device": "cpu"}, concurrency=2, should_continue_on_error=True),
        preprocess=lambda row: {
            "messages": [{"role": "user", "content": row["question"]}],
            "sampling_params": {"temperature": 0, "max_tokens": 20},
        },
        postprocess=lambda row: {"question": row["question"], "answer": row["generated_text"]},
    )
    processor(ray.data.read_parquet(f"{folder}/questions.parquet")).write_parquet(f"{folder}/answers")

    rows = ray.data.read_parquet(f"{folder}/answers").take_all()
    right = sum(row["answer"] == str(sum(map(int, row["question"][8:].split("+")))) for row in rows)
    print(f"{len(rows)} rows, {right} right answers, {folder}/answers")
