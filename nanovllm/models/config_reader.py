"""Reads ``config.json`` into a ``ModelConfig``. Imports no torch.

Every field that would change the computation is honoured or refused, never ignored. ``MODELS`` has the facts that
``config.json`` leaves out.
"""

import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from nanovllm.errors import CheckpointError
from nanovllm.models import MODELS
from nanovllm.models.config import LayerConfig, ModelConfig, MoEConfig, Scales
from nanovllm.models.families import SWITCHES, Family
from nanovllm.models.kinds import READERS, RECURRENT, load_kind
from nanovllm.models.recurrent import RecurrentConfig
from nanovllm.models.rope import DEFAULT_MAX_POSITION, OBJECT, POSITIVE, SIZE, RopeScaling, supported
from nanovllm.quantization import read_quantization
from nanovllm.utils.checkpoint import TOKEN_IDS, files_to_read, read_json, tensor_names
from nanovllm.validation import BOOLEAN, Rule, at_least, by_field, check, check_all, choice, integer, list_of, optional

MAX_LAYERS = 10_000  # a damaged number must not fill the memory with descriptions of layers
MAX_EXPERTS = 2048
DTYPES = ("bfloat16", "float16", "float32")
PROBLEMS = "regression", "multi_label_classification", "single_label_classification"
LABEL_ACTIVATIONS = {"regression": "", "multi_label_classification": "sigmoid"}  # by problem_type; else by their number
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}  # in config.json -> here
UNGATED = "relu2"  # the activation of MLPs without a gate


FLAG = Rule("true or false", optional(BOOLEAN).accepts, bool)
LAYERS = integer(f"an integer >= 1 and at most {MAX_LAYERS}", lambda n: 1 <= n <= MAX_LAYERS)
EXPERTS = integer(f"an integer >= 1 and at most {MAX_EXPERTS}", lambda n: 1 <= n <= MAX_EXPERTS)
COUNT = Rule("an integer >= 0 or None", optional(at_least(0)).accepts, lambda x: int(x or 0))
MTP_LAYERS = Rule(f"an integer from 0 to {MAX_LAYERS} or None", lambda x: COUNT.accepts(x) and (x or 0) <= MAX_LAYERS,
                  COUNT.convert)  # fmt: skip
SCALE = Rule("a positive number or None", optional(POSITIVE).accepts, lambda x: float(1 if x is None else x))
PATTERN = Rule(  # n: every n-th layer is global; converted to letters
    "an integer >= 1, letters L (local) and G (global), or None",
    lambda x: x is None or SIZE.accepts(x) or (isinstance(x, str) and bool(x) and set(x) <= {"L", "G"}),
    lambda x: x if isinstance(x, str) else "L" * ((x or 1) - 1) + "G",
)
LAYER = re.compile(r"(^|\.)layers\.\d+\.")  # in the name of a decoder layer's tensor
LABELS, BARE = "ForSequenceClassification", "Model"  # ends of names in place of "ForCausalLM": other heads, or none


def with_lm_head(architecture: str) -> str:
    """The name with an LM head, which has the row."""
    return re.sub(f"({LABELS}|Text{BARE}|{BARE})$", "ForCausalLM", architecture)


ARCHITECTURES = Rule(
    f"one of {', '.join(MODELS)} (others are not supported)",
    lambda x: isinstance(x, (list, tuple)) and len(x) == 1 and isinstance(x[0], str) and with_lm_head(x[0]) in MODELS,
)


def layer_types(*recurrent: str) -> Rule:
    names = ("full_attention", "sliding_attention", *recurrent)
    listed = f"{', '.join(map(repr, names[:-1]))} or {names[-1]!r}"
    return list_of(choice(*names), f"a list of {listed} (others are not supported)")


RULES = by_field(
    ("layer_types", layer_types("linear_attention")),
    ("hidden_act", supported(*ACTIVATIONS)),
    ("vocab_size hidden_size intermediate_size num_attention_heads max_position_embeddings", SIZE),
    ("num_hidden_layers", LAYERS),
    ("num_key_value_heads head_dim no_rope_layer_interval", optional(SIZE)),
    ("num_global_key_value_heads global_head_dim", optional(SIZE)),
    ("rms_norm_eps", POSITIVE),
    ("rope_local_base_freq query_pre_attn_scalar attention_multiplier", optional(POSITIVE)),
    ("attn_logit_softcapping final_logit_softcapping", optional(POSITIVE)),
    ("embedding_multiplier residual_multiplier logits_scaling lm_head_multiplier key_multiplier", SCALE),
    ("attention_in_multiplier attention_out_multiplier", SCALE),
    ("mlp_multipliers", Rule("a list of two positive numbers",
                             lambda x: x is None or (len(x) == 2 and all(map(POSITIVE.accepts, x))),
                             lambda x: tuple(x or (1.0, 1.0)))),
    ("sliding_window max_window_layers", COUNT),
    ("num_kv_shared_layers hidden_size_per_layer_input vocab_size_per_layer_input", COUNT),
    ("num_nextn_predict_layers", MTP_LAYERS),
    ("tie_word_embeddings attention_bias mlp_bias use_bias use_qk_norm", FLAG),
    ("attention_k_eq_v use_double_wide_mlp", FLAG),
    ("use_bidirectional_attention", supported(None, False, "vision")),  # for images (``vision.py``)
    ("attention_out_bias qkv_bias use_sliding_window", optional(BOOLEAN)),
    ("dtype", supported(*DTYPES)),
    ("eos_token_id", TOKEN_IDS),
    ("rope_parameters rope_scaling id2label per_layer_config", OBJECT),
    ("sliding_window_pattern", PATTERN),
    ("problem_type", choice(None, *PROBLEMS)),
    ("classifier_from_token", list_of(Rule("", lambda x: isinstance(x, str)), "a list of two tokens")),
    ("no_rope_layers", optional(list_of(choice(0, 1), "a list of 0 and 1"))),
)
MOE_RULES = by_field(
    ("num_experts", EXPERTS),
    ("num_experts_per_tok moe_intermediate_size", SIZE),
    ("n_group topk_group decoder_sparse_step", optional(SIZE)),
    ("shared_expert_intermediate_size n_shared_experts first_k_dense_replace", COUNT),
    ("moe_layer_end_index", optional(at_least(-1))),
    ("mlp_layer_types", list_of(choice("dense", "sparse"), "a list of 'dense' or 'sparse'")),
    ("norm_topk_prob", Rule("true or false", optional(BOOLEAN).accepts, lambda x: True if x is None else x)),
    ("routed_scaling_factor", SCALE),
    ("mlp_only_layers", list_of(at_least(0), "a list of layers")),
    ("scoring_func", optional(choice("softmax", "sigmoid"))),
    ("swiglu_limit", optional(POSITIVE)),
)
MOE_NAMES = (  # names of the same field; the first is ours
    ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    ("num_experts_per_tok", "moe_k", "top_k_experts"),
    ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    ("routed_scaling_factor", "router_scaling_factor"),
    ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers"),
    ("decoder_sparse_step", "moe_layer_interval"),
)  # fmt: skip
# keyed by kind of layers with states
RECURRENT_CONFIGS: dict[str, type[RecurrentConfig]] = {name: load_kind(path) for name, path in RECURRENT.items()}
# values of absent fields; any other field is required unless its rule allows None
DEFAULTS = {"hidden_act": "silu", "max_position_embeddings": DEFAULT_MAX_POSITION, "rms_norm_eps": 1e-6}


def read_raw(model_path: str) -> dict[str, Any]:
    """``config.json`` of a directory, and ModelOpt's older file next to it."""
    raw, modelopt = read_json(Path(model_path, "config.json")), Path(model_path, "hf_quant_config.json")
    if modelopt.is_file() and not raw.get("quantization_config"):
        given = check(str(modelopt), "quantization", read_json(modelopt).get("quantization"), OBJECT, CheckpointError)
        raw["quantization_config"] = {"quant_method": "modelopt", **(given or {})}
    return raw


def read_model_config(model_path: str) -> ModelConfig:
    """Read the configuration of a directory's model."""
    raw = read_raw(model_path)
    files, given = files_to_read(model_path), raw.get("architectures")
    of_layers = (name for file in files for name in tensor_names(file) if LAYER.search(name))
    is_bare = next(of_layers, "").startswith("layers.")
    if is_bare and isinstance(given, list) and not any("lm_head.weight" in tensor_names(file) for file in files):
        # a decoder saved alone, under the name of the model that it was taken from
        raw["architectures"] = [re.sub("ForCausalLM$", BARE, str(name)) for name in given]
    match raw.get("architectures"):
        case [str() as name] if with_lm_head(name) not in MODELS:
            for reader in READERS:
                if (config := load_kind(reader)(model_path, name)) is not None:
                    return config
    try:
        return model_config(raw, files)
    except (TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        file = Path(model_path, "config.json")
        raise CheckpointError(f"{file}: a field has a form that models of this kind never have ({error!r}).") from error


def model_config(raw: dict[str, Any], files: Sequence[Path] = ()) -> ModelConfig:
    """Read the dict of a ``config.json``; raises CheckpointError for a field that cannot be honoured.

    ``files``: of the weights.
    """
    family, raw = _normalized(raw)
    recurrent = RECURRENT_CONFIGS.get(family.recurrent)
    rules = RULES | (MOE_RULES if family.experts else {})
    rules |= recurrent.rules | {"layer_types": layer_types(*recurrent.mixers)} if recurrent else {}
    rules |= {"hidden_act": choice(UNGATED)} if family.ungated else {}
    given = check_all("config.json", raw, rules, CheckpointError)
    hidden, head_dim = given["hidden_size"], given["head_dim"] or given["hidden_size"] // given["num_attention_heads"]
    quant_method, fp8, weights = read_quantization(raw, family, files)
    if family.ungated and quant_method and fp8 is None:
        raise CheckpointError("config.json: quantized weights other than FP8 are not supported for this architecture.")
    layers = _layers(raw, given, family, weights)
    attention_alone = all(layer.mixer in ("", "attention") for layer in layers)  # Granite 4 Micro is dense
    ropes = [rope for rope in dict.fromkeys(layer.rope for layer in layers) if rope]
    for rope, size in dict.fromkeys((layer.rope, layer.head_dim) for layer in layers):
        if rope:
            rope.check_head(size)
    if given["hidden_size_per_layer_input"] and given["vocab_size_per_layer_input"] != given["vocab_size"]:
        raise CheckpointError("config.json: vocab_size_per_layer_input must be vocab_size.")
    act = "silu" if family.recurrent else "gelu_tanh" if given["hidden_size_per_layer_input"] else ""
    if act and not family.ungated and ACTIVATIONS[given["hidden_act"]] != act:
        raise CheckpointError(f"config.json: hidden_act={given['hidden_act']!r} is not supported here: only {act}.")
    # Qwen's recipe for yarn adds rope_scaling to a config.json and leaves max_position_embeddings
    stretched = [int(rope.factor * rope.original_max_position) for rope in ropes if rope.kind == "yarn"]
    check("config.json", "factor * original_max_position_embeddings", max([1, *stretched]), SIZE, CheckpointError)
    positions = max(given["max_position_embeddings"], *stretched, 0)
    bias = given["attention_bias"] or given["use_bias"]
    if bias and given["attention_in_multiplier"] != 1:  # the multiplier scales the input, not the bias
        raise CheckpointError("config.json: attention_bias=True is not supported with an attention_in_multiplier.")
    qkv_bias = family.qkv_bias if given["qkv_bias"] is None else given["qkv_bias"]
    o_bias = given["attention_out_bias"] if family.o_bias is None else family.o_bias
    divisor = given["query_pre_attn_scalar"] or head_dim
    (name,), label_tokens = raw["architectures"], given["classifier_from_token"]
    has_lm_head = name == with_lm_head(name) or len(label_tokens) > 0
    # transformers writes no number of labels, and their names only if there are not two
    if label_tokens and given["final_logit_softcapping"]:  # the host computes these logits
        raise CheckpointError("config.json: final_logit_softcapping is not supported with classifier_from_token.")
    num_labels = 0 if has_lm_head or name.endswith(BARE) else len(given["id2label"] or (0, 1))
    given |= {
        "family": family,
        "max_position_embeddings": positions,
        "num_positions": positions,
        "qkv_bias": bias if qkv_bias is None else qkv_bias,
        "o_bias": bias if o_bias is None else o_bias,
        "mlp_bias": given["mlp_bias"] or given["use_bias"],
        "act": UNGATED if family.ungated else ACTIVATIONS[given["hidden_act"]],
        "qk_norm": family.qk_norm or "head" * given["use_qk_norm"],
        # a factor of the input of q, k and v multiplies the scores by its square, and the result
        "attention_scale": (given["attention_multiplier"] or divisor**-0.5) * given["key_multiplier"]
        * given["attention_in_multiplier"] ** 2,
        "scales": Scales(
            given["attention_in_multiplier"] * given["attention_out_multiplier"], *given["mlp_multipliers"]
        ),
        "attention_softcap": given["attn_logit_softcapping"] or 0.0,
        "logit_softcap": given["final_logit_softcapping"] or 0.0,
        "embed_scale": hidden**0.5 if family.embed_scaled else given["embedding_multiplier"],
        "per_layer_size": given["hidden_size_per_layer_input"],
        "residual_scale": given["residual_multiplier"],
        "logit_scale": given["lm_head_multiplier"] / given["logits_scaling"] if has_lm_head else 1.0,
        "layers": layers,
        "moe": _moe(given, family) if any("experts" in layer.mlp for layer in layers) else None,
        "has_lm_head": has_lm_head,
        "num_labels": num_labels,
        "activation": LABEL_ACTIVATIONS.get(given["problem_type"], "softmax" if num_labels > 1 else "sigmoid"),
        "label_tokens": label_tokens,
        "recurrent": recurrent.read(given) if recurrent and not attention_alone else None,
        "quant_method": quant_method,
        "fp8": fp8,
        "eos_token_ids": given["eos_token_id"],
    }
    return ModelConfig(**{field.name: given[field.name] for field in fields(ModelConfig)})


def _normalized(raw: dict[str, Any]) -> tuple[Family, dict[str, Any]]:
    """The row of the architecture, and the fields with the names of today and the values of absent ones.

    Refuses fields that this architecture ignores, and that would change the numbers in others.
    """
    (name,) = check("config.json", "architectures", raw.get("architectures"), ARCHITECTURES, CheckpointError)
    family, name = MODELS[with_lm_head(name)], with_lm_head(name)
    if family.recurrent and family.recurrent not in RECURRENT:
        raise CheckpointError(f"config.json: layers of kind {family.recurrent!r} are not supported here.")
    # the language model's fields, in a model that also has a vision tower
    text = check("config.json", "text_config", raw.get("text_config"), OBJECT, CheckpointError) or {}
    kept = ("architectures", "eos_token_id", "dtype", "torch_dtype", "tie_word_embeddings")
    outer = {field: raw[field] for field in kept if raw.get(field) is not None}
    has_rope = any((raw | text).get(field) for field in ("rope_parameters", "rope_scaling"))
    defaults = {field: value for field, value in family.defaults.items() if field != "rope_parameters" or not has_rope}
    given = {field: value for field, value in (raw | text).items() if value is not None or field != "rope_parameters"}
    raw = {**DEFAULTS, **defaults, **given, **outer}
    raw |= family.spelled(raw) if family.spelled else {}
    raw["dtype"] = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if raw.get("rotary_dim") and raw.get("partial_rotary_factor") is None:  # MiniMax's form
        sizes = check_all("config.json", raw, {"rotary_dim": SIZE, "head_dim": SIZE}, CheckpointError)
        raw["partial_rotary_factor"] = sizes["rotary_dim"] / sizes["head_dim"]
    if family.without_experts and not any(raw.get(field) for field in MOE_NAMES[0]):
        family = family.without_experts
        raw["intermediate_size"] = raw.get("shared_expert_intermediate_size") or raw.get("intermediate_size")
    if raw.get("tie_word_embeddings") is None:
        raw["tie_word_embeddings"] = family.defaults.get("tie_word_embeddings")
    if raw["hidden_act"] in (None, "gelu"):  # Gemma's old files say so, and mean the tanh form
        raw["hidden_act"] = family.defaults.get("hidden_act", raw["hidden_act"])
    raw["hidden_act"] = raw.get("hidden_activation") or raw["hidden_act"]
    if "enable_moe_block" in family.reads and not raw.get("enable_moe_block"):
        family = family._replace(experts="")
    if family.experts:
        for names in MOE_NAMES:
            raw[names[0]] = next((raw[name] for name in names if raw.get(name) is not None), None)
        raw["moe_intermediate_size"] = raw.get("moe_intermediate_size") or raw.get("intermediate_size")
        raw["intermediate_size"] = raw.get("intermediate_size") or raw["moe_intermediate_size"]  # no dense layers
    switches: dict[str, tuple] = {} if family.experts else dict.fromkeys(MOE_NAMES[0], (0, 1))
    for kind, recurrent in RECURRENT_CONFIGS.items():
        switches |= {} if kind == family.recurrent else dict.fromkeys(recurrent.rules, ())
    switches |= SWITCHES
    for switch, neutral in switches.items():
        value = raw.get(switch)
        is_off = switch == "sliding_window" and raw.get("use_sliding_window") is False
        if switch not in family.reads and value not in (None, *neutral) and not is_off:
            allowed = " or ".join(["absent", *map(repr, neutral)])
            raise CheckpointError(f"config.json: {switch}={value!r:.300} must be {allowed} for {name}.")
    return family, raw


def _layers(raw: dict[str, Any], given: dict[str, Any], family: Family,
            weights: list[dict[str, Any]]) -> tuple[LayerConfig, ...]:
    window = 0 if given["use_sliding_window"] is False else given["sliding_window"]
    recurrent = RECURRENT_CONFIGS.get(family.recurrent)
    kinds = _kinds(given, family, recurrent, window)
    mixers, mlps = (recurrent.mixers, recurrent.mlps) if recurrent else ({}, {})
    assert not (family.experts and family.post_norm and family.sparse_mlp == "experts"), "they add the residual"
    windows = tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    ropes = _ropes(raw, given, family, windows)
    num_shared, layers = given["num_kv_shared_layers"], []
    first_shared = len(kinds) - num_shared
    if num_shared and not set(kinds[first_shared:]) <= set(kinds[: max(0, first_shared)]):
        raise CheckpointError(
            f"config.json: num_kv_shared_layers={num_shared} leaves no layer of a kind with keys and values of its own."
        )
    for i, (kind, window, rope, heads) in enumerate(zip(kinds, windows, ropes, _heads(given, kinds), strict=True)):
        mixer, shares = mixers.get(kind, "attention"), i >= first_shared
        own: dict[str, Any] = {
            "mlp": mlps.get(kind, family.sparse_mlp if family.experts and _is_sparse(given, i) else "dense"),
            "intermediate_size": given["intermediate_size"] * (2 if shares and given["use_double_wide_mlp"] else 1),
            **weights[i],
        }  # fmt: skip
        if not mixer.endswith("attention"):
            layers.append(LayerConfig(mixer, **own))
            continue
        is_same = given["attention_k_eq_v"] and kind == "full_attention"
        of_group = {"kind": kind, "shares_kv": shares} if num_shared or given["use_bidirectional_attention"] else {}
        layers.append(LayerConfig(mixer, window, rope, **heads, keys_are_values=is_same, **of_group, **own))
    return tuple(layers)


def _heads(given: dict[str, Any], kinds: tuple[str, ...]) -> list[dict[str, Any]]:
    """The head size and the number of KV heads of each layer."""
    num_heads, rules = given["num_attention_heads"], by_field(("head_dim num_key_value_heads", optional(SIZE)))
    plain = {
        "head_dim": given["head_dim"] or given["hidden_size"] // num_heads,
        "num_key_value_heads": given["num_key_value_heads"] or num_heads,
    }  # fmt: skip
    own, of_full = given["per_layer_config"], {"head_dim": given["global_head_dim"]}
    if given["attention_k_eq_v"]:
        of_full["num_key_value_heads"] = given["num_global_key_value_heads"]
    if own is None:
        own = {i: of_full for i, kind in enumerate(kinds) if kind == "full_attention"}
    elif strange := [name for name in own if not name.isdecimal() or int(name) >= len(kinds)]:
        raise CheckpointError(f"config.json: per_layer_config has {strange[0]!r:.100}, which is no layer.")
    own = {int(name): changes for name, changes in own.items()}
    found = []
    for i in range(len(kinds)):
        where, changes = f"config.json: per_layer_config: {i}", own.get(i, {})
        changes = check(where, "fields", changes, OBJECT, CheckpointError) or {}
        if unknown := {name: value for name, value in changes.items() if name not in rules}:
            raise CheckpointError(f"{where} has unsupported fields {unknown!r:.300}.")
        changes = {name: value for name, value in check_all(where, changes, rules, CheckpointError).items() if value}
        heads = plain | changes
        head_dim, kv_heads = heads.values()
        if num_heads % kv_heads:
            raise CheckpointError(f"config.json: {num_heads} attention heads cannot be shared by {kv_heads} KV heads.")
        check("config.json", "num_attention_heads * head_dim", num_heads * head_dim or 1, SIZE, CheckpointError)
        found.append(heads)
    return found


def _kinds(given: dict[str, Any], family: Family, recurrent: type[RecurrentConfig] | None,
           window: int) -> tuple[str, ...]:
    """The ``layer_types``, as given or by the rule of the family."""
    num_layers, pattern = given["num_hidden_layers"], given["sliding_window_pattern"]
    for name in ("layer_types", "no_rope_layers", "mlp_layer_types"):
        if given.get(name) and len(given[name]) != num_layers:
            raise CheckpointError(f"config.json: {name} has {len(given[name])} entries for {num_layers} layers.")
    slides = {
        "": lambda i: False,
        "all": lambda i: window,
        "late": lambda i: window and i >= given["max_window_layers"],
        "pattern": lambda i: window and pattern[i % len(pattern)] == "L",
        "unrotated": lambda i: window and not _is_rotated(given, i),
    }[family.windows]
    by_rule = tuple("sliding_attention" if slides(i) else "full_attention" for i in range(num_layers))
    if recurrent:
        by_rule = tuple(recurrent.layer_type(given, i) for i in range(num_layers))
    kinds = given["layer_types"] or by_rule
    if "linear_attention" in kinds and not recurrent:
        raise CheckpointError("config.json: layer_types has 'linear_attention', which this architecture does not know.")
    if recurrent and not any(recurrent.mixers.get(kind, kind).endswith("attention") for kind in kinds):
        raise CheckpointError(
            f"config.json: no layer is attention, by layer_types or {recurrent.layers_field}; models without an "
            "attention layer are not supported."
        )
    if family.decoder == "gemma4":  # transformers makes the last layer full, whatever the file says
        kinds = (*kinds[:-1], "full_attention")
    if "sliding_attention" in kinds and not window:
        raise CheckpointError("config.json: layer_types has 'sliding_attention' without a sliding_window.")
    given_slides, by_rule_slides = ([kind == "sliding_attention" for kind in each] for each in (kinds, by_rule))
    if family.windows in ("", "all") and given_slides != by_rule_slides:
        raise CheckpointError(
            f"config.json: layer_types and sliding_window={given['sliding_window']} say different things."
        )
    return kinds


def _is_sparse(given: dict[str, Any], layer: int) -> bool:
    if given["mlp_layer_types"]:
        return given["mlp_layer_types"][layer] == "sparse"
    last = given["moe_layer_end_index"]
    is_dense = layer < given["first_k_dense_replace"] or layer in given["mlp_only_layers"]
    is_dense |= last is not None and 0 <= last < layer
    return not is_dense and (layer + 1) % (given["decoder_sparse_step"] or 1) == 0


def _is_rotated(given: dict[str, Any], layer: int) -> bool:
    """NoPE: some layers leave positions out."""
    rotated, interval = given["no_rope_layers"], given["no_rope_layer_interval"]
    if rotated:
        return bool(rotated[layer])
    return not interval or (layer + 1) % interval > 0


def _ropes(raw: dict[str, Any], given: dict[str, Any], family: Family,
           windows: tuple[int, ...]) -> tuple[RopeScaling | None, ...]:
    """RoPE of each layer, None without one. Layers with and without a window may differ."""
    parts = given["rope_parameters"] or {}
    theta = given["rope_local_base_freq"] or raw.get("rope_theta", 10_000.0)
    if {"full_attention", "sliding_attention"} & set(parts):
        full = {**raw, "rope_parameters": parts.get("full_attention")}
        local = {**raw, "rope_theta": theta, "rope_parameters": parts.get("sliding_attention")}
    elif family.plain_window_rope:
        full, local = raw, {**raw, "rope_parameters": None, "rope_scaling": None, "rope_theta": theta}
    else:
        full = local = raw
    of_full, of_local = RopeScaling.from_json(full), RopeScaling.from_json(local)
    for name in ("partial_rotary_factor", "llama_4_scaling_beta"):
        for rope in (of_full, of_local):
            if name == "partial_rotary_factor" and rope.kind == "proportional":
                continue
            value = getattr(rope, name)
            if value != getattr(RopeScaling(), name) and name not in family.reads:
                raise CheckpointError(f"config.json: {name}={value} is not supported for this architecture.")
    by_window = family.rotates_windows_only and any(windows)
    return tuple(
        (of_local if window else of_full) if _is_rotated(given, i) and (window or not by_window) else None
        for i, window in enumerate(windows)
    )


def _moe(given: dict[str, Any], family: Family) -> MoEConfig:
    if given["scoring_func"] not in (None, family.experts):
        raise CheckpointError(
            f"config.json: scoring_func={given['scoring_func']!r}, but this architecture has {family.experts!r}."
        )
    num_experts, top_k = given["num_experts"], given["num_experts_per_tok"]
    groups, top_groups = given["n_group"] or 1, given["topk_group"] or 1
    if num_experts % groups or not top_groups <= groups or top_k > num_experts // groups * top_groups:
        raise CheckpointError(
            f"config.json: {top_k} of {num_experts} experts cannot be chosen from {top_groups} of {groups} groups."
        )
    if family.experts_transposed and given["hidden_size"] in (given["moe_intermediate_size"] * n for n in (1, 2)):
        raise CheckpointError("config.json: experts of the hidden size, or half, look the same transposed.")
    if family.gpt_oss_experts and given["swiglu_limit"] is None:
        raise CheckpointError("config.json: swiglu_limit=None must be a number > 0 for this architecture.")
    shared = given["shared_expert_intermediate_size"] or given["n_shared_experts"] * given["moe_intermediate_size"]
    check("config.json", "units of the shared experts", shared or 1, SIZE, CheckpointError)
    limit = given["swiglu_limit"] if family.gpt_oss_experts else 0.0
    return MoEConfig(
        num_experts, top_k, given["moe_intermediate_size"], given["norm_topk_prob"], given["routed_scaling_factor"],
        groups, top_groups, shared, limit,
    )
