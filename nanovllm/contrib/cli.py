"""The command ``nanovllm``: ``nanovllm batch IN OUT`` and ``nanovllm plot METRICS OUT``.

Owns the options. Those of sampling and of the engine are made from the fields and docstrings of ``SamplingParams`` and
``Config``, so that none is forgotten.
"""

import argparse
import json
import os
import re
import signal
import sys
from contextlib import suppress
from dataclasses import fields
from typing import Any, get_args

from nanovllm import __version__
from nanovllm.config import Config
from nanovllm.errors import NanoVLLMError
from nanovllm.sampling_params import SamplingParams
from nanovllm.validation import did_you_mean

# fields of SamplingParams but logits_processors: functions are for programs
SAMPLING_FIELDS = [f for f in fields(SamplingParams) if f.name != "logits_processors"]
# fields of Config but some: --seed belongs to the requests, quiet is for scripts
ENGINE_FIELDS = [f for f in fields(Config) if f.init and f.name not in ("model", "seed", "quiet")]
EXAMPLES = {  # values of options that take JSON
    "stop_token_ids": "[198, 271]", "allowed_token_ids": "[15, 16]", "logprob_token_ids": "[15, 16]",
    "logit_bias": '{"198": -5.5}', "structured_outputs": '{"json": {"type": "object"}, "disable_any_whitespace": true}',
    "speculative_config": '{"method": "ngram"}',
    "repetition_detection": '{"max_pattern_size": 32, "min_count": 4}',
    "limit_mm_per_prompt": '{"image": 4}', "mm_processor_kwargs": '{"max_pixels": 1000000}',
    "allowed_media_domains": '["example.org"]',
}  # fmt: skip
ABOUT = """Complete every row of IN and write a row to OUT as soon as it is finished, in the order of completion.
Stopped at any moment (Ctrl-C, SIGKILL, power) and started again with the same command, it goes on: every row is there
once."""
IN = """.jsonl (plain rows, or OpenAI batch lines with "custom_id" and "body"), .parquet or .csv; or a directory of
such files, read in the order of their names. A path or a URL, as s3://bucket/in.jsonl, hf://datasets/user/name/data. A
column "image" or "images" has images: bytes, data URLs, or paths below the directory of IN"""
OUT = """a .jsonl file; or a directory, without suffix, for part-*.parquet; local. OUT.run.json beside it remembers what
it was made with. Exit status: 0, or 3 if rows failed ("error" says why; the others are complete), 1 if the job
failed, 130 after Ctrl-C"""
SAMPLING = """Rows may have their own: a column "sampling_params", or the body. Every row draws from a seed of its own,
derived from --seed (default 0) and its id."""


def main(argv: list[str] | None = None) -> int:
    if sys.stderr is None:  # by 2>&-; the next file that is opened would be stderr for C libraries and children
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        os.set_inheritable(sys.stderr.fileno(), True)
    parser = argparse.ArgumentParser("nanovllm", description="Offline LLM inference.")
    parser.add_argument("--version", action="version", version=f"nanovllm {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="batch | plot")
    batch = commands.add_parser("batch", help="complete every row of a file", description=ABOUT, allow_abbrev=False,
                                usage="nanovllm batch IN OUT [options]; --help lists them")  # fmt: skip
    add = batch.add_argument
    add("input", metavar="IN", help=IN)
    add("output", metavar="OUT", help=OUT)
    add("--model", help="a directory or hub id; default: the bundled demo model")
    add("--id-column", metavar="NAME", help='of plain rows; default: "custom_id" or "id", else the row\'s number')
    add("--prompt-column", metavar="NAME", default="prompt", help="a text, or a list of token ids; default: prompt")
    add("--prompt", metavar="TEXT", help="of rows that have none, such as rows of images")
    add("--messages-column", metavar="NAME", default="messages", help="a conversation, answered in place of a prompt")
    add("--chat", action="store_true", help="a prompt is what a user says: apply the chat template")
    add("--chat-template-kwargs", metavar="JSON", type=json_value, default={}, help="its variables, as an object")
    add("--data-parallel-size", metavar="N", type=int, default=1, help="engines, each in a process on GPUs of its own")
    add("--shard", metavar="K/N", help="only every Nth row, K from 0 to N - 1; writes OUT-K-of-N")
    add("--limit", metavar="N", type=int, help="only the first N rows (of the shard), of which two are printed on "
        "stderr; the command without it goes on")  # fmt: skip
    add("--retry-errors", action="store_true", help="do the rows again that failed")
    add("--overwrite", action="store_true", help="drop what OUT holds")
    add("--metrics", metavar="FILE", help="append a line of JSON every second; nanovllm plot draws it")
    add_fields(batch.add_argument_group("sampling", SAMPLING), SAMPLING_FIELDS, SamplingParams)
    add_fields(batch.add_argument_group("engine"), ENGINE_FIELDS, Config)
    plot = commands.add_parser("plot", help="draw what --metrics wrote", description="Draw what --metrics wrote.")
    plot.add_argument("metrics", help="the file of batch --metrics")
    plot.add_argument("output", help=".html, one page that needs nothing else; or .png")
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        names = [*vars(args), *(f.name for f in (*fields(SamplingParams), *ENGINE_FIELDS))]
        hint = did_you_mean(unknown[0].partition("=")[0], [option_of(name) for name in names])
        {"batch": batch, "plot": plot}[args.command].error(f"unknown arguments: {' '.join(unknown)}.{hint}")
    with suppress(ValueError):  # not on the main thread
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # a job that a scheduler ends closes its output
    try:
        if args.command == "plot":
            from nanovllm.contrib.jobs.plot import run
        else:
            from nanovllm.contrib.jobs.batch import run

            args.engine = {f.name: getattr(args, f.name) for f in ENGINE_FIELDS if hasattr(args, f.name)}
            args.sampling = {f.name: getattr(args, f.name) for f in SAMPLING_FIELDS if hasattr(args, f.name)}
        return run(args)
    except (NanoVLLMError, OSError) as error:
        # an OSError may quote a URL, as all of the library's do
        print(f"nanovllm {args.command}: error: {NanoVLLMError(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def add_fields(group: Any, options: Any, owner: type) -> None:
    """Add an option for each field, described by the owner's docstring; absent unless it is given."""
    docs = dict(re.findall(r"^        (\w+): (.*(?:\n {12}.*)*)", owner.__doc__ or "", re.MULTILINE))
    for option in options:
        kinds = get_args(option.type) or (option.type,)
        how: dict[str, Any] = {"type": str if str in kinds else json_value, "metavar": "X"}
        if bool in kinds:
            how = {"action": argparse.BooleanOptionalAction}
        elif list[str] in kinds:
            how = {"action": "append", "metavar": "TEXT"}  # may be repeated
        text = " ".join(docs[option.name].split()).replace("%", "%%")
        if how.get("action") == "append":
            text += " May be given several times."
        elif option.name in EXAMPLES:
            text += f" For example '{EXAMPLES[option.name]}'."
        group.add_argument(option_of(option.name), default=argparse.SUPPRESS, help=text, **how)


def option_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def json_value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor JSON") from None
