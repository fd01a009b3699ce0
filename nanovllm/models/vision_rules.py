"""Checks the numbers that a vision tower divides by or builds layers from, before transformers sees them.

Owns the rules of ``vision_config`` and the projector's fields next to it. Knows the names in transformers' classes of
configuration, and none of their code. Imports neither torch nor transformers.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nanovllm import validation
from nanovllm.errors import CheckpointError
from nanovllm.validation import Rule, at_least, by_field, check, check_all, choice, integer, list_of, number, optional

if TYPE_CHECKING:
    from nanovllm.models.vision import VisionConfig

MAX_LAYERS, MAX_HEADS, MAX_SIZE = 1024, 1024, 1 << 16
POSITIVE = number("a number > 0", lambda x: x > 0)
OBJECT = Rule("an object", lambda x: isinstance(x, dict))
ACTIVATION = choice("gelu", "gelu_fast", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "relu", "silu", "swish")
LAYERS = list_of(at_least(0), "a list of layers")
DIFFERENT = Rule("a list of different layers", lambda x: LAYERS.accepts(x) and len(set(x or ())) == len(x or ()))
OF_TOWER = by_field(
    ("depth num_hidden_layers", integer(f"an integer from 1 to {MAX_LAYERS}", lambda n: 1 <= n <= MAX_LAYERS)),
    ("num_heads num_attention_heads num_key_value_heads",
     integer(f"an integer from 1 to {MAX_HEADS}", lambda n: 1 <= n <= MAX_HEADS)),
    ("hidden_size embed_dim intermediate_size out_hidden_size window_size num_position_embeddings mlp_ratio head_dim "
     "position_embedding_size mm_embed_dim mm_posemb_size output_proj_dims",
     integer(f"an integer from 1 to {MAX_SIZE}", lambda n: 1 <= n <= MAX_SIZE)),
    ("in_channels num_channels", choice(3)),
    ("hidden_act hidden_activation", ACTIVATION),
    ("use_clipped_linears standardize", validation.BOOLEAN),
    ("layer_norm_eps rms_norm_eps rope_theta", POSITIVE),
    ("rope_parameters", optional(OBJECT)),
    ("deepstack_visual_indexes", DIFFERENT),
    ("fullatt_block_indexes", LAYERS),
)
OF_PROJECTOR = by_field(
    ("projector_hidden_act", ACTIVATION),
    ("vision_feature_layer", Rule(  # transformers takes 0 for none, because it is falsy
        "a layer but 0, or a list of layers",
        lambda x: x not in (0, []) and all(map(integer("").accepts, x if isinstance(x, list) else [x])),
    )),
)  # fmt: skip


def check_fields(raw: Mapping[str, Any], vision: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a field of ``config.json`` or its ``vision_config`` with an impossible value.

    Absent fields have transformers' defaults.
    """
    given = {name: rule for name, rule in OF_TOWER.items() if name in vision}
    check_all("config.json: vision_config", vision, given, CheckpointError)
    theta = (vision.get("rope_parameters") or {}).get("rope_theta", 1)
    check("config.json: vision_config", "rope_parameters.rope_theta", theta, POSITIVE, CheckpointError)
    given = {name: rule for name, rule in OF_PROJECTOR.items() if name in raw}
    check_all("config.json", raw, given, CheckpointError)


def check_sizes(config: Any, tower: "VisionConfig") -> None:
    """Raise CheckpointError for fields that contradict each other; ``config`` is transformers' of the whole model."""
    vision, side, num_tokens = config.vision_config, tower.patch_size * tower.merge_size, tower.num_whole
    if tower.family.places:
        return check_sizes_of_gemma4(vision)
    by_sizes, width_name, output_name = tower.family.by_sizes, "hidden_size", "out_hidden_size"
    is_siglip = tower.family.module in ("gemma3", "paddleocr_vl")
    if tower.family.module == "qwen2_vl":
        width_name, output_name = "embed_dim", "hidden_size"
    names = ("num_attention_heads", "num_hidden_layers") if by_sizes or is_siglip else ("num_heads", "depth")
    heads_name, depth_name = names
    width, heads, depth = (getattr(vision, name) for name in (width_name, heads_name, depth_name))
    if width % heads or (not num_tokens and width // heads % 4):  # a quarter each for sines and cosines of two axes
        by = "" if num_tokens else " by a multiple of 4"
        raise wrong(f"{width_name}={width} must be a multiple of {heads_name}={heads}{by}")
    if by_sizes and vision.head_dim != width // heads:
        raise wrong(f"head_dim={vision.head_dim} must be {width_name}={width} / {heads_name}={heads}")
    if not (by_sizes or is_siglip) and getattr(vision, output_name) != config.text_config.hidden_size:
        raise wrong(f"{output_name}={getattr(vision, output_name)} must be the text's {config.text_config.hidden_size}")
    if tower.family.module == "qwen2_5_vl" and vision.window_size < side:
        raise wrong(f"window_size={vision.window_size} must be at least {side}, the pixels of a token's side")
    if tower.family.deepstack and max(vision.deepstack_visual_indexes, default=0) >= depth:
        raise wrong(f"deepstack_visual_indexes={vision.deepstack_visual_indexes} must be below depth={depth}")
    size = getattr(vision, "image_size", side)  # with ``mrope`` of the table of positions, and no limit of images
    if size < (tower.patch_size if tower.family.mrope else side):
        least = f"{tower.patch_size}, the pixels of a patch's side"
        least = least if tower.family.mrope else f"{side}, the pixels of a token's side"
        raise wrong(f"image_size={size} must be at least {least}")
    if num_tokens and (tower.image_size // tower.patch_size) ** 2 != num_tokens * tower.merge_size**2:
        raise wrong(
            f"image_size={tower.image_size} and patch_size={tower.patch_size} make no square of mm_tokens_per_image="
            f"{num_tokens} tokens"
        )
    layers = getattr(config, "vision_feature_layer", -1)
    for layer in layers if isinstance(layers, list) else [layers]:
        if not -depth - 1 <= layer <= depth:
            raise wrong(f"{depth_name}={depth} has no output for vision_feature_layer={layers}")


def check_sizes_of_gemma4(vision: Any) -> None:
    """The same for Gemma 4, whose 12B has no layers in place of a tower."""
    if not hasattr(vision, "num_attention_heads"):
        if vision.output_proj_dims != vision.mm_embed_dim:
            raise wrong(f"output_proj_dims={vision.output_proj_dims} must be mm_embed_dim={vision.mm_embed_dim}")
        return
    heads, kv_heads = vision.num_attention_heads, vision.num_key_value_heads
    if heads % kv_heads:
        raise wrong(f"num_attention_heads={heads} must be a multiple of num_key_value_heads={kv_heads}")
    if vision.head_dim % 4:
        raise wrong(f"head_dim={vision.head_dim} must be a multiple of 4")
    if (kind := (vision.rope_parameters or {}).get("rope_type", "axial")) not in ("axial", "default"):
        raise wrong(f"rope_parameters.rope_type={kind!r:.50} must be 'axial' or 'default'")


def wrong(what: str) -> CheckpointError:
    return CheckpointError(f"config.json: vision_config: {what}.")
