"""Vision towers of this library's layers: the table of them. Other families and activations are transformers'."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from nanovllm.models.towers.gemma4 import Gemma4Tower, UnifiedTower
from nanovllm.models.towers.pixtral import PixtralTower
from nanovllm.models.towers.qwen import Qwen2_5Vision, Qwen3Vision, QwenTower

QWEN3 = partial(QwenTower, kind=Qwen3Vision)
# module in transformers.models -> hidden_act of its ``vision_config``, "" for any, and a function of transformers'
# configuration
TOWERS: dict[str, tuple[str, Callable[[Any], nn.Module]]] = {
    "qwen2_5_vl": ("silu", partial(QwenTower, kind=Qwen2_5Vision)),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), ("gelu_pytorch_tanh", QWEN3)),
    "gemma4": ("", Gemma4Tower),
    "gemma4_unified": ("", UnifiedTower),
    "mistral3": ("silu", partial(PixtralTower, names=("vision_tower", "multi_modal_projector"))),
    "lighton_ocr": ("silu", partial(PixtralTower, names=("vision_encoder", "vision_projection"))),
}


def tower_of(module: str, config: Any) -> Callable[[], nn.Module] | None:
    """A function that builds the tower of a checkpoint with this configuration, if it is one of ``TOWERS``."""
    hidden_act, build = TOWERS.get(module, ("", None))
    is_last_layer = getattr(config, "vision_feature_layer", -1) == -1
    has_gelu = getattr(config, "projector_hidden_act", "gelu") == "gelu"
    has_act = hidden_act in ("", getattr(config.vision_config, "hidden_act", ""))
    if build is None or not (has_act and is_last_layer and has_gelu):
        return None
    return partial(build, config)
