"""``adapter_config.json`` of a PEFT adapter: its rules, and the modules and ranks that PEFT reads from it.

Each field is honoured, has no effect on the numbers, or is refused; so is a config whose modules or ranks are not those
of the adapter's tensors. ``lora.py`` reads the tensors. Imports no torch.
"""

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from nanovllm.errors import CheckpointError
from nanovllm.utils.checkpoint import read_json
from nanovllm.utils.patterns import first_matches
from nanovllm.validation import BOOLEAN, Rule, at_least, check_all, list_of, number, optional

FLOAT32_MAX = 3.4028234663852886e38
# Without effect here. The targets are linear layers, where PEFT takes fan_in_fan_out as False.
NO_EFFECT = (
    "fan_in_fan_out", "lora_dropout", "inference_mode", "base_model_name_or_path", "revision", "task_type",
    "auto_mapping", "peft_version", "megatron_core", "qalora_group_size", "ensure_weight_tying", "loftq_config",
    "eva_config", "corda_config", "lora_ga_config", "runtime_config",
)  # fmt: skip
KEEPS_BASE = (None, True, False, "gaussian", "orthogonal", "eva")  # initialisations that leave the base's weights alone
ADVICE = "Merge it by PEFT's merge_and_unload(), save the model, and give that directory as the model."
FINITE = number("a finite number of 32 bits", lambda x: abs(x) <= FLOAT32_MAX)
STRINGS = list_of(Rule("", lambda x: isinstance(x, str)), "a list of strings or None")
NAMES = Rule("a string, a list of strings or None", lambda x: isinstance(x, str) or STRINGS.accepts(x))
LAYER = at_least(0)
LAYERS = Rule("a layer, a list of layers or None", lambda x: LAYER.accepts(x) or list_of(LAYER, "").accepts(x))


def object_of(rule: Rule, what: str) -> Rule:
    return optional(Rule(f"an object of {what}", lambda x: isinstance(x, dict) and all(map(rule.accepts, x.values()))))


RULES = {
    "r": optional(at_least(1)),
    "rank_pattern": object_of(at_least(1), "integers >= 1"),
    "lora_alpha": FINITE,
    "alpha_pattern": object_of(FINITE, "finite numbers of 32 bits"),
    "use_rslora": optional(BOOLEAN),
    "target_modules": NAMES,
    "exclude_modules": NAMES,
    "modules_to_save": STRINGS,
    "layers_to_transform": LAYERS,
    "layers_pattern": NAMES,
}
READ = ("peft_type", "init_lora_weights", "bias", *RULES)
# The base's tensors in modules that are linear layers, or embeddings, in every version of transformers. Routers and
# experts are not.
TARGETS = re.compile(
    r"(?:model\.|language_model\.)*"
    r"(layers\.\d+\.(?:(?:self_attn|mlp|conv)\.\w+_proj|feed_forward\.w[123])|embed_tokens|lm_head)\.\w+"
)
NOT_ALL_LINEAR = ("embed_tokens", "lm_head")  # left out by target_modules="all-linear"


def read_config(path: str) -> dict[str, Any]:
    """The fields of ``RULES``; CheckpointError if the adapter does anything but add a product to weights."""
    file = Path(path, "adapter_config.json")
    config = read_json(file)
    wrong = [name for name, value in config.items() if value and name not in (*READ, *NO_EFFECT)]
    wrong += [name for name, allowed in (("peft_type", ("LORA",)), ("bias", (None, "none")),
                                         ("init_lora_weights", KEEPS_BASE))
              if config.get(name) not in allowed]  # fmt: skip
    if wrong:
        given = ", ".join(f"{name}={config.get(name)!r:.100}" for name in wrong)
        raise CheckpointError(f"{file}: {given} is not supported. {ADVICE}")
    config = check_all(str(file), {"lora_alpha": 8, **config}, RULES, CheckpointError)
    for name in ("layers_to_transform", "layers_pattern"):
        has_list = not isinstance(config["target_modules"], str) and config["layers_to_transform"] is not None
        if config[name] not in (None, [], "") and not has_list:
            raise CheckpointError(
                f"{file}: {name}={config[name]!r:.100} needs a list of target_modules, and layers_to_transform, not "
                f"target_modules={config['target_modules']!r:.100}. PEFT refuses this file, too."
            )
    return config


class Targets:
    """The modules and ranks that PEFT reads from a config.

    Args:
        config: ``read_config``'s.
        file: its path, for errors.
    """

    def __init__(self, config: dict[str, Any], file: Path):
        self._config, self._file = config, file

    def check(self, ranks: dict[str, int], whole: Collection[str], base: Collection[str]) -> None:
        """Raise CheckpointError where the adapter has other tensors than PEFT would make by the config.

        In some layers a target may lack tensors: PEFT leaves it as it is in the base.

        Args:
            ranks: of the modules that have factors.
            whole: names of the base's tensors that the adapter replaces.
            base: names of the base's tensors.
        """
        config, modules = self._config, list(ranks)
        for module, field in self._left_out(modules).items():
            raise self._contradiction(field, f"leaves out module {module!r}, and the adapter has tensors of it")
        for module, rank in self.numbers("rank_pattern", "r", modules).items():
            if rank not in (None, ranks[module]):
                field = "r" if rank == config["r"] else "rank_pattern"
                raise self._contradiction(field, f"gives rank {rank} to {module!r}, whose tensors have {ranks[module]}")
        self._check_all_there(modules, base)
        for name in config["modules_to_save"] or ():
            is_saved, is_there = (any(f".{name}." in f".{each}" for each in names) for names in (whole, base))
            if is_there and not is_saved:
                raise self._contradiction("modules_to_save", f"names {name!r}, and the adapter has no tensors of it")

    def _check_all_there(self, modules: list[str], base: Collection[str]) -> None:
        """Raise CheckpointError: a target has tensors in no layer, or a layer of ``layers_to_transform`` has none."""
        if self._config["target_modules"] is None:
            return
        kinds, layers = ({split(module)[i] for module in modules} for i in (1, 0))
        has_layers = self._config["layers_to_transform"] not in (None, [])
        others = [
            other for other in sorted(in_names_of(modules, base))
            if split(other)[1] not in kinds or (has_layers and split(other)[0] not in layers)
        ]  # fmt: skip
        left_out = self._left_out(others)
        for module in others:
            if module not in left_out:
                field = "target_modules" if split(module)[1] not in kinds else "layers_to_transform"
                raise self._contradiction(field, f"names {module!r}, and the adapter has no tensors of such modules")

    def numbers(self, field: str, default: str, modules: list[str]) -> dict[str, Any]:
        """The number of the first pattern that names a module, else the value of field ``default``."""
        numbers = self._config[field] or {}
        patterns = {pattern: rf"(.*\.)?({pattern})$" for pattern in numbers}
        found = self._matches(field, patterns, modules)
        return {module: numbers[found[module]] if module in found else self._config[default] for module in modules}

    def _left_out(self, modules: list[str]) -> dict[str, str]:
        """The field by which PEFT passes over a module, for the modules that have one."""
        config, targets = self._config, self._config["target_modules"]
        saved = {name: rf"(^|.*\.){name}($|\..*)" for name in config["modules_to_save"] or ()}
        left_out: dict[str, Collection[str]] = {
            "exclude_modules": self._named("exclude_modules", modules),
            "modules_to_save": self._matches("modules_to_save", saved, modules),
            "target_modules": set(modules) - self._named("target_modules", modules) if targets is not None else (),
            "layers_to_transform": self._in_other_layers(modules),
        }
        fields = {module: [field for field in left_out if module in left_out[field]] for module in modules}
        return {module: each[0] for module, each in fields.items() if each}

    def _named(self, field: str, modules: list[str]) -> set[str]:
        """The modules that a field's regular expression matches, or that are in its list."""
        value = self._config[field]
        if isinstance(value, str) and value.lower() == "all-linear" and field == "target_modules":
            return {module for module in modules if module.rpartition(".")[2] not in NOT_ALL_LINEAR}
        if isinstance(value, str):
            return set(self._matches(field, {value: value} if value else {}, modules, "fullmatch"))
        ends = tuple(f".{name}" for name in value or ())
        return {module for module in modules if f".{module}".endswith(ends)}

    def _in_other_layers(self, modules: list[str]) -> set[str]:
        layers, given = self._config["layers_to_transform"], self._config["layers_pattern"]
        if layers in (None, []):
            return set()
        patterns = [given] if isinstance(given, str) and given else given
        regexes = {pattern: rf"(?:^|.*?\.){pattern}\.(?P<idx>\d+)\." for pattern in patterns or ()}
        found = self._matches("layers_pattern", regexes or {"": r".*?\.[^.]*\.(?P<idx>\d+)\."}, modules, group="idx")
        wanted = {str(layer) for layer in (layers if isinstance(layers, list) else [layers])}
        by_whole_name = self._config["target_modules"] or ()  # PEFT looks at no layer of these
        return {module for module in modules if found.get(module) not in wanted and module not in by_whole_name}

    def _matches(self, field: str, patterns: dict[str, str], modules: list[str], method: str = "match",
                 group: str = "") -> dict[str, str]:
        try:
            return first_matches(patterns, modules, method, group)
        except ValueError as error:
            raise CheckpointError(f"{self._file}: {field} has {error}. {ADVICE}") from None

    def _contradiction(self, field: str, text: str) -> CheckpointError:
        return CheckpointError(
            f"{self._file}: {field}={self._config[field]!r:.300} {text}. Save the adapter by PEFT again, or correct "
            "the file."
        )


def split(module: str) -> tuple[str, str]:
    """The layer of a module, and the module's name in there."""
    match = re.match(r"(.*?layers\.\d+)\.(.+)", module)
    return (match[1], match[2]) if match else ("", module)


def in_names_of(modules: list[str], base: Collection[str]) -> set[str]:
    """The base's modules of ``TARGETS``, named as the adapter's ``modules`` are."""
    found = (re.fullmatch(r"((?:\w+\.)*?)(?:layers\.\d+\..+|embed_tokens)", module) for module in modules)
    prefix = next((match[1] for match in found if match), "model.")
    is_whole = prefix != "" and not any(module.endswith("lm_head") for module in modules)
    names = {match[1] for match in map(TARGETS.fullmatch, base) if match}
    return {prefix + name for name in names - {"lm_head"}} | (names & {"lm_head"} if is_whole else set())
