"""``nanovllm batch``: complete every row of a file, exactly once however often the job is stopped.

The job reads the input twice: for the ids, then for the rows that are not done. Of each row it keeps a
hash of the id; engines take rows as they have room. So a million rows need little more memory than a thousand.
"""

import re
import sys
from array import array
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from tqdm import tqdm

from nanovllm.errors import ConfigError
from nanovllm.jobs.files import Input, Output, begun, end_last_line, fingerprint, output_at
from nanovllm.jobs.rows import Row, hash_of, ready
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checkpoint import read_generation_config, resolve_model

# options of the engine that change speed and memory alone: a job may go on with others
FREE = ("max_num_batched_tokens", "max_num_seqs", "gpu_memory_utilization", "tensor_parallel_size", "enforce_eager",
        "kvcache_block_size", "num_kvcache_blocks", "device", "attention_backend", "enable_prefix_caching",
        "trust_remote_code")  # fmt: skip
SHOWN_BYTES = 1 << 20  # of each file of the model, at its beginning and end, go into the fingerprint


def run(args: Any) -> int:
    """The command. Everything that can be wrong is looked at before an engine starts."""
    path, (k, n) = Path(args.output), shard_of(args.shard)
    if path.name in ("", ".."):
        raise ConfigError(f"OUT={path} must have a name, for OUT.run.json lies beside it.")
    if args.shard:
        path = path.with_name(f"{path.stem}-{k}-of-{n}{path.suffix}")
    if args.data_parallel_size < 1:
        raise ConfigError(f"--data-parallel-size {args.data_parallel_size}: it must be at least 1.")
    model_path = resolve_model(args.model, args.engine.get("revision"))
    defaults = {} if args.engine.get("generation_config") == "vllm" else read_generation_config(model_path)
    args.base_params = SamplingParams(**ready({**defaults, **args.sampling}))
    source = Input(Path(args.input))
    there, out = Path(args.input).resolve(), path.resolve()
    if there in (out, out.parent) or out in there.parents:  # the last: --overwrite would delete it
        raise ConfigError(f"OUT={path} is the input, lies in it, or holds it.")
    hashes, all_integers = scan_ids(source, args)
    output = output_at(path, all_integers)
    if args.metrics:
        if Path(args.metrics).resolve() in (there, out):
            raise ConfigError(f"--metrics {args.metrics}: it is IN or OUT, and would be appended to.")
        end_last_line(Path(args.metrics))
    with begun(output, args.overwrite, lambda: facts_of(args, model_path, source, len(hashes))):
        done, num_errors = output.scan(args.retry_errors)
        todo = ~np.isin(np.frombuffer(hashes, np.uint64), np.frombuffer(done, np.uint64))
        todo[np.arange(len(todo)) % n != k] = False
        rows, num_todo = source.rows_to_do(todo, hashes, args.id_column), int(todo.sum())
        return complete(args, output, rows, len(range(k, len(todo), n)) - num_todo, num_todo, num_errors)


def shard_of(shard: str | None) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", shard or "0/1")
    k, n = map(int, match.groups()) if match else (0, 0)
    if k >= n:
        raise ConfigError(f"--shard {shard}: it must be K/N, with K from 0 to N - 1, such as 0/4.")
    return k, n


def scan_ids(source: Input, args: Any) -> tuple[array, bool]:
    """A hash of every row's id, and whether all ids are 64-bit integers. Finds out which columns there are."""
    hashes, all_integers, columns = array("Q"), True, dict[str, None]()
    for index, values in enumerate(source.rows()):
        if isinstance(values, dict):
            if args.id_column is None and not columns and "body" not in values:
                args.id_column = next((name for name in ("custom_id", "id") if name in values), None)
            columns.update(dict.fromkeys(values))
        key = Row(index, values, args.id_column).key
        all_integers &= isinstance(key, int) and -(2**63) <= key < 2**63
        hashes.append(hash_of(key))
    if not hashes:
        raise ConfigError(f"IN={args.input} holds no rows.")
    for options in (("id_column",), ("prompt_column", "messages_column")):
        names = [name for option in options if (name := getattr(args, option)) is not None]
        if columns and names and not columns.keys() & {*names, "body"}:
            raise ConfigError(
                f"IN={args.input}: no row has {' or '.join(map(repr, names))}; there are {', '.join(columns):.200}. "
                f"Name a column by {' or '.join('--' + option.replace('_', '-') for option in options)}."
            )
    order = np.argsort(column := np.frombuffer(hashes, np.uint64), kind="stable")
    again = np.flatnonzero(column[order][1:] == column[order][:-1])
    if len(again):
        first, second = order[again[0] : again[0] + 2].tolist()
        key = Row(second, next(islice(source.rows(), second, None)), args.id_column).key
        raise ConfigError(
            f"IN={args.input}: rows {first} and {second} (counted from 0) have the same id {key!r}. Rows "
            f"that repeat an id: {len(again):,}. Make the ids unique, or name another --id-column."
        )
    return hashes, all_integers


def facts_of(args: Any, model_path: str, source: Input, num_rows: int) -> dict[str, Any]:
    """What the output depends on."""
    patterns = ("*.json", "*.jinja", "*.safetensors")  # configuration and tokenizer, chat template, weights
    files = [path for pattern in patterns for path in sorted(Path(model_path).glob(pattern))]
    options = ("id_column", "prompt_column", "messages_column", "chat", "chat_template_kwargs")
    given = {**{name: getattr(args, name) for name in options}, **args.engine, **args.sampling}
    return {
        "model": args.model or "the demo model", "contents of the model": fingerprint(files, SHOWN_BYTES),
        "rows of the input": num_rows, "contents of the input": fingerprint(source.files),
        **{"--" + name.replace("_", "-"): value for name, value in given.items() if name not in FREE},
    }  # fmt: skip


def complete(args: Any, output: Output, rows: Iterator[Row], num_before: int, num_todo: int, num_errors: int) -> int:
    """Write a record for each of the rows, count and show them, and print a summary; the exit status."""
    from nanovllm.jobs import engines

    started, num_rows, num_done = perf_counter(), num_before + num_todo, 0
    first_at, tokens = 0.0, [0, 0, 0]  # when the first row was done; tokens of prompts, cached, generated

    def emit(record: dict[str, Any], of_record: tuple[int, int, int]) -> None:
        nonlocal num_done, num_errors, first_at, tokens
        output.append(record)
        first_at = first_at or perf_counter()
        num_done += 1
        num_errors += record["error"] is not None
        tokens = [a + b for a, b in zip(tokens, of_record, strict=True)]
        seconds = max(perf_counter() - first_at, 0.1)
        bar.set_postfix_str(f"{tokens[2] / seconds:,.0f} tokens/s", refresh=False)
        bar.update()

    if num_todo:
        run_engines = engines.complete if args.data_parallel_size == 1 else engines.complete_in_processes
        bar = tqdm(total=num_rows, initial=num_before, unit=" rows", dynamic_ncols=True,
                   mininterval=0.2 if sys.stderr.isatty() else 10)  # fmt: skip
        try:
            with bar, output.opened():
                run_engines(args, rows, emit)
        finally:
            if num_done < num_todo:
                say(f"{num_before + num_done:,} of {num_rows:,} rows are in {output.path}; the same command goes on.")
    say(f"{num_rows:,} rows in {output.path}: {num_done:,} now, {num_before:,} before, {num_errors:,} of them errors.")
    if num_done:
        seconds, (prompt, cached, generated) = perf_counter() - started, tokens
        say(f"{seconds:,.1f} s with start: {num_done / seconds:,.1f} rows/s, {generated:,} tokens generated "
            f"({generated / seconds:,.0f}/s), {prompt:,} in prompts ({cached:,} of them cached).")  # fmt: skip
    return 3 if num_errors else 0


def say(text: str) -> None:
    print(text, file=sys.stderr)
