"""The mixer of LFM2: a causal convolution of a few tokens between two gates; its state is its last inputs.

Owns its weights, and how they are sharded: by channels. ``kernels/short_conv/reference.py`` defines the computation.
"""

from typing import ClassVar

from nanovllm.distributed.group import TPGroup
from nanovllm.kernels.short_conv.reference import ShortConvStates, ShortConvWeights
from nanovllm.layers.attention import AttentionBackend
from nanovllm.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.models.config import LayerConfig, ModelConfig
from nanovllm.models.recurrent.mixer import RecurrentMixer, conv_weight
from nanovllm.models.recurrent.short_conv.config import ShortConvConfig


class ShortConv(RecurrentMixer):
    name: ClassVar[str] = "conv"
    States = ShortConvStates

    def __init__(self, config: ModelConfig, layer: LayerConfig, rope: RotaryEmbedding | None,
                 backend: AttentionBackend, tp: TPGroup):
        super().__init__(config, tp)
        conv, C = config.recurrent, config.hidden_size
        assert isinstance(conv, ShortConvConfig)
        kinds = [config.precision(layer, f"conv.{name}") for name in ("in_proj", "out_proj")]
        # the gates before and after the convolution, and x; checkpoints store them as one tensor
        self.in_proj = MergedColumnParallelLinear(C, [conv.channels] * 3, tp=tp, precision=kinds[0])
        self.conv_weight = conv_weight([conv.channels], conv.conv_size, tp)
        self.weights = ShortConvWeights(self.conv_weight)
        self.out_proj = RowParallelLinear(conv.channels, C, tp=tp, precision=kinds[1])
