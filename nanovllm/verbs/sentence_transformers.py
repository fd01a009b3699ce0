"""Reads the sentence-transformers files in a checkpoint, which say how it embeds texts.

Owns the form of texts before they are tokenized, and the kind of pooling. Without ``modules.json`` no file is read.
"""

from collections.abc import Sequence as ListLike
from pathlib import Path
from typing import Any, NamedTuple

from nanovllm.engine.input_processor import InputProcessor
from nanovllm.engine.text.prompts import Prompt, split_prompt
from nanovllm.errors import CheckpointError, RequestError
from nanovllm.models.rope import supported
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checkpoint import folder_within, read_json
from nanovllm.validation import BOOLEAN, Rule, at_least, by_field, check_all, optional

# in a Pooling module's config.json -> here; newer files have one field, "pooling_mode", older ones a flag for each mode
MODES = {"lasttoken": "last", "cls": "cls", "mean": "mean"}
FLAGS = {"pooling_mode_lasttoken": "lasttoken", "pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean"}
OPTIONS = ("torch_dtype", "dtype", "attn_implementation", "trust_remote_code", "device_map", "use_cache",
           "low_cpu_mem_usage", "padding_side", "use_fast", "revision", "code_revision")  # fmt: skip
HARMLESS = Rule(f"an object with no more than {', '.join(OPTIONS)} (others are not supported)",
                lambda x: x is None or (isinstance(x, dict) and x.keys() <= set(OPTIONS)))  # fmt: skip
PLAIN_TEXT = {"method": "forward", "method_output_name": "last_hidden_state"}
TRANSFORMER_RULES = by_field(
    ("max_seq_length", optional(at_least(1))),
    ("do_lower_case", optional(BOOLEAN)),
    # from here on fields of version 5, and others that are not honoured
    ("transformer_task", supported(None, "feature-extraction")),
    ("module_output_name", supported(None, "token_embeddings")),
    ("modality_config", Rule(f'an object with "text": {PLAIN_TEXT} (others are not supported)',
                             lambda x: x is None or (isinstance(x, dict) and x.get("text") == PLAIN_TEXT))),
    ("processing_kwargs", Rule('an object without "common" and "text", which are not supported',
                               lambda x: x is None or (isinstance(x, dict) and not {"common", "text"} & x.keys()))),
    ("query_length document_length query_expansion", supported(None)),
    ("model_args tokenizer_args config_args model_kwargs tokenizer_kwargs processor_kwargs config_kwargs", HARMLESS),
)
PROMPTS = Rule(
    "an object of texts or None",
    lambda x: x is None or (isinstance(x, dict) and all(isinstance(text, (str, type(None))) for text in x.values())),
)
MODEL_RULES = {"prompts": PROMPTS, "truncate_dim": optional(at_least(1))}


class Texts(NamedTuple):
    """The form of texts that are embedded; prompts that are token ids stay as they are."""

    instruction: str = ""  # put before each
    max_tokens: int | None = None  # special tokens count, and the last ones stay where a text is cut
    keeps_end: bool = False  # texts would be cut at their beginning, which raises an error
    is_lower_case: bool = False
    dimensions: int | None = None  # ``truncate_dim``: of the embeddings, unless a call says otherwise

    def encode(self, inputs: InputProcessor, prompts: ListLike[Prompt], first: int) -> list[tuple[str | None, Any]]:
        """As ``InputProcessor.encode``."""
        if not any(self._replace(dimensions=None)):
            return inputs.encode(prompts, first)
        is_cut = self.max_tokens is not None and self.max_tokens <= inputs.config.max_model_len
        cut = SamplingParams(truncate_prompt_tokens=self.max_tokens) if is_cut else None
        encoded = inputs.encode([self._written(prompt) for prompt in prompts], first, cut)
        are_texts = [split_prompt(prompt)[1] is None for prompt in prompts]
        special = inputs.encode([""])[0][1] if self.max_tokens and any(are_texts) else []
        return [(text, self._cut(ids, special) if is_text else ids)
                for (text, ids), is_text in zip(encoded, are_texts, strict=True)]  # fmt: skip

    def _written(self, prompt: Prompt) -> Prompt:
        text = prompt.get("prompt") if isinstance(prompt, dict) else prompt
        if not isinstance(text, str) or (isinstance(prompt, dict) and prompt.get("prompt_token_ids") is not None):
            return prompt
        text = self.instruction + text
        text = text.lower() if self.is_lower_case else text
        return {**prompt, "prompt": text} if isinstance(prompt, dict) else text

    def _cut(self, ids: list[int], special: list[int]) -> list[int]:
        """``special``: the tokens of an empty text."""
        if self.max_tokens is None or len(ids) <= self.max_tokens:
            return ids
        if self.keeps_end:
            raise RequestError(
                f"the text has {len(ids)} tokens. Those over model_max_length={self.max_tokens} would be cut at its "
                "beginning (truncation_side='left'), which is not supported. Shorten it."
            )
        num_last = 0
        while num_last < len(special) and special[-1 - num_last] == ids[-1 - num_last]:
            num_last += 1
        return [*ids[: max(self.max_tokens - num_last, 0)], *ids[len(ids) - num_last :]]


def read_texts(model_path: str) -> Texts:
    """Read the default prompt, ``max_seq_length`` or the tokenizer's ``model_max_length``, and ``do_lower_case``.

    Raises:
        CheckpointError: a file is damaged, or a field has a value that is not supported.
    """
    name, dimensions, path = None, None, Path(model_path, "config_sentence_transformers.json")
    modules, instruction = _modules(model_path), ""
    if modules and path.is_file():
        config = read_json(path)
        name = config.get("default_prompt_name")
        given = check_all(str(path), config, MODEL_RULES, CheckpointError)
        prompts, dimensions = given["prompts"] or {}, given["truncate_dim"]
        if name is not None and (not isinstance(name, str) or name not in prompts):
            raise CheckpointError(f"{path}: default_prompt_name={name!r:.300} must be one of {list(prompts)} or None.")
        instruction = (prompts[name] or "") if name is not None else ""
    path = Path(model_path, "tokenizer_config.json")
    of_tokenizer = read_json(path) if modules and path.is_file() else {}
    length, is_lower_case, is_left = None, False, of_tokenizer.get("truncation_side") == "left"
    for module, folder in modules:
        for file in sorted(folder.glob("sentence_*_config.json"))[:1] if module == "Transformer" else ():
            given = check_all(str(file), read_json(file), TRANSFORMER_RULES, CheckpointError)
            length, is_lower_case = given["max_seq_length"], bool(given["do_lower_case"])
            if length and is_left:
                raise CheckpointError(f"{file}: max_seq_length={length} is not supported with truncation_side='left'.")
    if length is None and at_least(1).accepts(of_tokenizer.get("model_max_length")):  # version 5 writes it there
        length = of_tokenizer["model_max_length"]
    return Texts(instruction, length, is_left, is_lower_case, dimensions)


def read_pooling(model_path: str) -> tuple[str, bool]:
    """Read ``modules.json`` and the Pooling module's ``config.json``; without these files it is ("last", True).

    Returns:
        The kind of ``POOLING`` (readouts/pooled_state.py), of which hidden states an embedding is the mean; and whether
        embeddings are divided by their L2 norm, unless a call says otherwise.
    """
    modules = _modules(model_path)
    if not modules:
        return "last", True
    kind, normalize = "last", False
    for name, folder in modules:
        if name == "Pooling":
            kind = _kind(folder / "config.json")
        elif name == "Normalize":
            normalize = True
        elif name != "Transformer":
            raise CheckpointError(
                f"{Path(model_path, 'modules.json')}: module {name!r:.300} is not supported, only Transformer, Pooling "
                "and Normalize."
            )
    return kind, normalize


def _kind(path: Path) -> str:
    config = read_json(path)
    given = config.get("pooling_mode")
    modes = given if isinstance(given, list) else [given] if given else []
    modes = modes or [FLAGS.get(flag, flag) for flag, on in config.items() if flag.startswith("pooling_mode_") and on]
    if len(modes) != 1 or not isinstance(modes[0], str) or modes[0] not in MODES:
        given = " + ".join(map(str, modes)) or "without a mode"
        raise CheckpointError(f"{path}: pooling {given:.300} is not supported, only one of {', '.join(MODES)}.")
    if modes[0] != "lasttoken" and config.get("include_prompt") is False:
        raise CheckpointError(f"{path}: include_prompt=false is not supported: instructions count like other tokens.")
    return MODES[modes[0]]


def _modules(model_path: str) -> list[tuple[str, Path]]:
    """Class name and folder of each module; none without ``modules.json``."""
    path = Path(model_path, "modules.json")
    modules = read_json(path, list) if path.is_file() else []
    if not all(isinstance(module, dict) for module in modules):
        raise CheckpointError(f"{path} holds no list of modules.")
    return [(str(module.get("type")).rpartition(".")[2], folder_within(model_path, module.get("path"), path))
            for module in modules]  # fmt: skip
