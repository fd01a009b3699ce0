"""``nanovllm batch``: complete every row of a file, exactly once however often the job is stopped.

The job reads the input three times: for the ids, for a fingerprint of its contents, and for the rows that are not done.
It keeps only a hash of each row's id, and engines take rows as they have room. So a million rows need little more
memory than a thousand.
"""

import json
import re
import sys
from collections import Counter
from contextlib import closing
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from tqdm import tqdm

from nanovllm.config import read_generation_config, resolve_model
from nanovllm.contrib.jobs.files import Input, Output, begun, end_last_line, fingerprint, located
from nanovllm.contrib.jobs.rows import CUT, ERROR, IMAGES, as_object, end_of, ready
from nanovllm.errors import ConfigError
from nanovllm.sampling_params import SamplingParams
from nanovllm.validation import has_feature

# options of the engine that change speed and memory alone: a job may go on with others
FREE = ("max_num_batched_tokens", "max_num_seqs", "gpu_memory_utilization", "tensor_parallel_size", "enforce_eager",
        "kvcache_block_size", "num_kvcache_blocks", "device", "attention_backend", "enable_prefix_caching",
        "trust_remote_code", "speculative_config", "allowed_local_media_path", "allowed_media_domains")  # fmt: skip
USED = (*IMAGES, "custom_id", "id", "sampling_params", "body", "method", "url")  # columns, besides the options'
SMALL = ("*.json", "*.jinja", "*.txt", "*.model", "*.py")  # a model's files besides its weights
WHOLE_BYTES = 64 << 20  # larger files of a model are sampled for the fingerprint


def run(args: Any) -> int:
    """Run the command. Everything that can be wrong is checked before an engine starts."""
    path, (k, n) = Path(args.output), shard_of(args.shard)
    for name, given in (("OUT", args.output), ("--metrics", args.metrics)):
        if "://" in (given or ""):
            raise ConfigError(f"{name}={given} must be a local path, for the job appends to it; copy it afterwards.")
    if path.name in ("", ".."):
        raise ConfigError(f"OUT={path} must have a name, for OUT.run.json lies beside it.")
    if args.shard:
        path = path.with_name(f"{path.stem}-{k}-of-{n}{path.suffix}")
    if args.data_parallel_size < 1:
        raise ConfigError(f"--data-parallel-size {args.data_parallel_size}: it must be at least 1.")
    if args.limit is not None and args.limit < 1:
        raise ConfigError(f"--limit {args.limit}: it must be at least 1.")
    as_object("--chat-template-kwargs", args.chat_template_kwargs)
    model_path = resolve_model(args.model, args.engine.get("revision"))
    defaults = {} if args.engine.get("generation_config") == "vllm" else read_generation_config(model_path)
    args.base_params = SamplingParams(**ready({**defaults, **args.sampling}))
    filesystem, location = located(args.input)
    there, out = Path(location).resolve(), path.resolve()
    if filesystem is None and (there in (out, out.parent) or out in there.parents):  # --overwrite would delete it
        raise ConfigError(f"OUT={path} is the input, lies in it, or holds it.")
    source = Input(args.input, args.id_column)
    check_columns(args, source.columns)
    args.image_columns = [name for name in IMAGES if name in source.columns]
    if filesystem is None and has_feature("engine.images"):  # paths of images are relative to the input's directory
        args.engine.setdefault("allowed_local_media_path", str(there if there.is_dir() else there.parent))
    used = {*USED, args.id_column, args.prompt_column, args.messages_column}
    if unused := [name for name in source.columns if name not in used]:
        say(f"Columns of IN that are not used: {', '.join(unused):.300}.")
    output = Output(path, source.ids_are_integers, source.id_names)
    written = output.written()
    read = {file.resolve(): file for file in source.files if isinstance(file, Path)}
    if shared := [read[file] for file in read.keys() & written]:
        raise ConfigError(f"OUT={path}: the job would write to {shared[0]}, which is a file of IN. Give another OUT.")
    if args.metrics:
        if Path(args.metrics).resolve() in {*read, *written}:
            raise ConfigError(f"--metrics {args.metrics}: it is IN or OUT, and would be appended to.")
        end_last_line(Path(args.metrics))
    with begun(output, facts_of(args, model_path, source), args.overwrite):
        is_mine = np.arange(len(source.hashes)) % n == k
        if args.limit is not None:
            is_mine &= np.cumsum(is_mine) <= args.limit
        mine = None if args.limit is None else set(source.hashes[is_mine].tolist())
        done, ends = output.scan(args.retry_errors, mine)
        todo = is_mine & ~np.isin(source.hashes, done)
        status = complete(args, source, todo, output, ends[np.isin(done, source.hashes[is_mine])])
        if mine is not None:
            for record in islice(output.records(mine), 2):
                say(f"{json.dumps(record, ensure_ascii=False):.2000}")
        return status


def shard_of(shard: str | None) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", shard or "0/1")
    k, n = map(int, match.groups()) if match else (0, 0)
    if k >= n:
        raise ConfigError(f"--shard {shard}: it must be K/N, with K from 0 to N - 1, such as 0/4.")
    return k, n


def check_columns(args: Any, columns: list[str]) -> None:
    for options in (("id_column",), ("prompt_column", "messages_column")):
        names = [name for option in options if (name := getattr(args, option)) is not None]
        names = [] if args.prompt and "prompt_column" in options else names
        if columns and names and not {*columns} & {*names, "body"}:
            raise ConfigError(
                f"IN={args.input}: no row has {' or '.join(map(repr, names))}; there are {', '.join(columns):.200}. "
                f"Name a column by {' or '.join('--' + option.replace('_', '-') for option in options)}."
            )


def facts_of(args: Any, model_path: str, source: Input) -> dict[str, Any]:
    """The facts that the output depends on, by name."""
    lora, tokenizer = args.engine.get("lora"), args.engine.get("tokenizer")
    tokenizer = None if args.engine.get("skip_tokenizer_init") else tokenizer
    contents = {"the model": model_contents(model_path)}
    if lora is not None:
        contents["--lora"] = model_contents(resolve_model(lora, option="lora"))
    if tokenizer is not None:
        contents["--tokenizer"] = model_contents(resolve_model(tokenizer, weights=False, option="tokenizer"), SMALL)
    options = ("id_column", "prompt", "prompt_column", "messages_column", "chat", "chat_template_kwargs")
    given = {**{name: getattr(args, name) for name in options}, **args.engine, **args.sampling}
    return {
        "model": args.model or "the demo model", **{f"contents of {name}": each for name, each in contents.items()},
        "rows of the input": len(source.hashes), "contents of the input": fingerprint(source.files),
        **{"--" + name.replace("_", "-"): value for name, value in given.items() if name not in FREE},
    }  # fmt: skip


def model_contents(path: str, patterns: tuple[str, ...] = (*SMALL, "*.safetensors")) -> str:
    return fingerprint([file for pattern in patterns for file in sorted(Path(path).glob(pattern))], WHOLE_BYTES)


def complete(args: Any, source: Input, todo: np.ndarray, output: Output, ends: np.ndarray) -> int:
    """Write a record for each of the rows, count and show them, and print a summary; the exit status.

    ``ends``: how each row that was done before has ended, as ``Output.scan`` returns it.
    """
    from nanovllm.contrib.jobs import engines

    started, size, num_before, num_todo = perf_counter(), source.num_bytes(), len(ends), int(todo.sum())
    num_rows, num_done, num_incomplete = num_before + num_todo, 0, 0
    counts = Counter(ends.tolist())
    tokens = np.zeros(3, int)  # prompt, cached and generated tokens
    if num_todo:
        if args.data_parallel_size > 1:
            records = engines.complete_in_processes(args, source, todo)
        else:
            records = engines.complete(args, source.rows_to_do(todo))
        bar = tqdm(total=num_rows, initial=num_before, unit="row", dynamic_ncols=True,
                   mininterval=0.2 if sys.stderr.isatty() else 10)  # fmt: skip
        try:
            with bar, output.opened(), closing(records):
                for record, of_record in records:
                    output.append(record)
                    num_done += 1
                    counts[end_of(record)] += 1
                    tokens += of_record[:3]
                    num_incomplete += sum(of_record[3:])
                    bar.set_postfix_str(f"{tokens[2] / (perf_counter() - started):,.0f} tokens/s", refresh=False)
                    bar.update()
        finally:
            if output.num_written < num_todo:  # rows of a part that could not be written are done again
                num_there = num_before + output.num_written
                say(f"{num_there:,} of {num_rows:,} rows are in {output.path}; the same command goes on.")
    if source.num_bytes() > size:
        say(f"IN has grown while the job ran; done are the {len(todo):,} rows that it held at the start.")
    num_errors, num_cut = counts[ERROR], counts[CUT]
    say(f"{num_rows:,} rows in {output.path}: {num_done:,} now, {num_before:,} before, {num_errors:,} of them errors.")
    if num_cut or num_incomplete:
        incomplete = f" Structured outputs of the rows now that are incomplete: {num_incomplete:,}."
        say(f"{num_cut:,} of them ended at max_tokens.{incomplete if num_incomplete else ''}")
    if num_rows == args.limit:
        say(f"--limit {args.limit}: without it the same command does the other rows, too.")
    if num_done:
        seconds, (prompt, cached, generated) = perf_counter() - started, tokens
        say(f"{seconds:,.1f} s with start: {num_done / seconds:,.1f} rows/s, {generated:,} tokens generated "
            f"({generated / seconds:,.0f}/s), {prompt:,} in prompts ({cached:,} of them cached).")  # fmt: skip
    return 3 if num_errors else 0


def say(text: str) -> None:
    print(text, file=sys.stderr)
