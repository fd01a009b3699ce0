"""Completions of a Ray data set, on as many engines as the cluster has room for: ``pip install '.[ray]'``.

Owns the engine that an actor runs, and the columns that go in and out; names and columns are those of ``ray.data.llm``.
Distribution, retries and checkpoints are Ray Data's. Batches overlap inside an engine, so that it never waits for the
last rows of one. See ``examples/ray_data.py``.
"""

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nanovllm import ConfigError, RequestError, RequestOutput, SamplingParams
from nanovllm.contrib.integrations.engine_thread import EngineThread
from nanovllm.contrib.jobs.files import without_nones
from nanovllm.contrib.jobs.rows import IMAGES, images_of, ready, with_images
from nanovllm.errors import as_request_error
from nanovllm.llm import Prompt

try:
    import pyarrow as pa
    from ray.data import ActorPoolStrategy, Dataset
except ModuleNotFoundError as error:
    remedy = "Install Ray Data 2.59 or later: pip install '.[ray]' in the checkout."
    raise ModuleNotFoundError(f"{error}. {remedy}") from error

ERROR = "__inference_error__"
IDS = pa.list_(pa.int32())
LOGPROB = pa.struct({"logprob": pa.float32(), "rank": pa.int32(), "decoded_token": pa.string()})
LOGPROBS = pa.list_(pa.map_(pa.int32(), LOGPROB))
COLUMNS: dict[str, tuple[pa.DataType, Callable[[Any], Any]]] = {  # types, which error rows alone do not show
    "prompt_token_ids": (IDS, lambda output: output.prompt_token_ids),
    "num_input_tokens": (pa.int32(), lambda output: len(output.prompt_token_ids)),
    "generated_tokens": (IDS, lambda output: output["token_ids"]),
    "generated_text": (pa.string(), lambda output: output["text"]),
    "num_generated_tokens": (pa.int32(), lambda output: len(output["token_ids"])),
    "finish_reason": (pa.string(), lambda output: output["finish_reason"]),
    "logprobs": (LOGPROBS, lambda output: _items(output.outputs[0].logprobs)),
    "prompt_logprobs": (LOGPROBS, lambda output: _items(output.prompt_logprobs)),
}


@dataclass
class ProcessorConfig:
    """Options of ``build_processor``: the model, the number of engines, their devices.

    Args:
        model_source: a directory that every node sees, a hub id, or None for the demo model.
        engine_kwargs: options of ``LLM``. All ranks of an engine are on one node.
        concurrency: engines; or (fewest, most), and Ray adds engines while rows wait.
        batch_size: rows that travel together.
        max_concurrent_batches: of one engine; 8 batches of 64 are 512 rows, the default ``max_num_seqs``.
        num_gpus: of one engine; None is ``tensor_parallel_size``, or 0 with ``device="cpu"``.
        num_cpus: of one engine; None is Ray's default, 1. It is the number of threads with ``device="cpu"``.
        accelerator_type, runtime_env: as in Ray.
        should_continue_on_error: a row that cannot be served says why in "__inference_error__", which is "" in others;
            it skips ``postprocess`` and keeps its columns. Else it ends the job.
        rows_per_block: rows that go to an engine, and later to a file, together; None is ``batch_size``. 0 leaves the
            blocks as they are: a small file is one, and only one engine works on it.
    """

    model_source: str | None = None
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    concurrency: int | tuple[int, int] = 1
    batch_size: int = 64
    max_concurrent_batches: int = 8
    num_gpus: float | None = None
    num_cpus: float | None = None
    accelerator_type: str | None = None
    runtime_env: dict[str, Any] | None = None
    should_continue_on_error: bool = False
    rows_per_block: int | None = None

    def __post_init__(self) -> None:
        if "seed" in self.engine_kwargs:
            raise ConfigError("engine_kwargs: with one seed all engines draw the same noise; give rows a seed instead.")


def build_processor(config: ProcessorConfig, preprocess: Callable[[dict], dict] | None = None,
                    postprocess: Callable[[dict], dict] | None = None) -> Callable[[Dataset], Dataset]:
    """A function from data set to data set.

    Args:
        preprocess: from a row to columns that are added to it: "messages", "prompt" or "tokenized_prompt"; perhaps
            "sampling_params", a dictionary (absent: the checkpoint's defaults), and "chat_template_kwargs"; and
            "image" or "images", bytes, data URLs or what ``engine_kwargs`` allow, for places in the messages.
        postprocess: from a row with ``COLUMNS`` to the row that is kept; None keeps all.
    """

    def process(dataset: Dataset) -> Dataset:
        c = config
        low, high = (c.concurrency, c.concurrency) if isinstance(c.concurrency, int) else c.concurrency
        num_gpus = 0 if c.engine_kwargs.get("device") == "cpu" else c.engine_kwargs.get("tensor_parallel_size") or 1
        pool = ActorPoolStrategy(min_size=low, max_size=high, max_concurrent_calls_per_actor=c.max_concurrent_batches)
        if preprocess is not None:
            dataset = dataset.map(lambda row: {**row, **preprocess(row)})
        if c.rows_per_block != 0:
            dataset = dataset.repartition(target_num_rows_per_block=c.rows_per_block or c.batch_size)
        dataset = dataset.map_batches(
            Engine, fn_constructor_args=(c.model_source, c.engine_kwargs, c.should_continue_on_error), compute=pool,
            batch_size=c.batch_size, batch_format="pyarrow", udf_modifying_row_count=False, num_cpus=c.num_cpus,
            num_gpus=num_gpus if c.num_gpus is None else c.num_gpus, accelerator_type=c.accelerator_type,
            runtime_env=c.runtime_env,
        )  # fmt: skip
        if postprocess is None:
            return dataset
        added = {ERROR: ""} if c.should_continue_on_error else {}
        return dataset.map(lambda row: row if row[ERROR] else {**postprocess(row), **added})

    return process


class Engine:
    """The engine of an actor: a pyarrow table in, the same with ``COLUMNS`` out. If its process dies (``EngineThread``
    says when), Ray restarts the actor and runs its calls again; after an exception it would do neither.
    """

    def __init__(self, model: str | None, options: dict[str, Any], continue_on_error: bool):
        self._engine = EngineThread(model, **{"seed": secrets.randbits(62), "quiet": True, **options})
        self._default_params, self._continue = self._engine.llm.get_default_sampling_params(), continue_on_error

    async def __call__(self, table: pa.Table) -> pa.Table:
        outputs = await asyncio.gather(*map(self._complete, table.to_pylist()), return_exceptions=True)
        errors = [output if isinstance(output, BaseException) else None for output in outputs]
        for error in errors:
            if error is not None and not (self._continue and isinstance(error, RequestError)):
                raise error
        columns = {ERROR: pa.array([str(error or "") for error in errors], pa.string())}
        for name, (kind, value) in COLUMNS.items():
            values = [None if error else value(output) for output, error in zip(outputs, errors, strict=True)]
            columns[name] = pa.array(values, kind)
        rest = table.drop_columns([name for name in columns if name in table.column_names])
        return pa.table({**dict(zip(rest.column_names, rest.columns, strict=True)), **columns})

    async def _complete(self, row: dict[str, Any]) -> RequestOutput:
        try:
            prompt, params = self._request(row)
        except BaseException as error:
            refused = as_request_error(error)
            raise refused from refused.__cause__
        output = await asyncio.wrap_future(self._engine.submit(prompt, params))
        if output["finish_reason"] == "error":
            raise RequestError(str(output.outputs[0].stop_reason))
        return output

    def _request(self, row: dict[str, Any]) -> tuple[Prompt, SamplingParams]:
        llm, text, ids = self._engine.llm, row.get("prompt"), row.get("tokenized_prompt")
        # Arrow gives the dictionaries of a column the same keys; those that a row did not name are None
        given, messages = without_nones(row.get("sampling_params")), without_nones(row.get("messages"))
        images = images_of({name: without_nones(row.get(name)) for name in IMAGES})
        params = self._default_params if given is None else SamplingParams(**ready(given))
        if params.n != 1:
            raise RequestError(f"n={params.n} must be 1: a row has one completion. Repeat the row.")
        if messages:
            is_open = messages[-1].get("role") == "assistant"
            options = {"add_generation_prompt": not is_open, "continue_final_message": is_open}
            options |= without_nones(row.get("chat_template_kwargs")) or {}
            (prompt,) = llm.chat_prompts([with_images(messages, images)], params, **options)
            return prompt, params
        if text is None and ids is None:
            raise RequestError('a row needs "messages", "prompt" or "tokenized_prompt".')
        if text is not None and ids is None:
            (ids,) = llm.tokenize([text], True, params)
        others = {"multi_modal_data": {"image": images}} if images else {}
        return {"prompt": text, "prompt_token_ids": ids, **others}, params


def _items(logprobs: Any) -> list | None:
    """[{token id: Logprob}] in Arrow's form."""
    return logprobs and [at and [(token_id, vars(logprob)) for token_id, logprob in at.items()] for at in logprobs]
