"""Tiny random models with vision towers, made by transformers, no two dimensions equal; and transformers' answers."""

import re
from importlib import import_module
from importlib.util import find_spec

import numpy as np
import torch

IMAGE, START, END, ROW_END, LAST_END = 190, 192, 193, 194, 195
TEXT = {
    "vocab_size": 200, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-6, "max_position_embeddings": 700,
    "tie_word_embeddings": False,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [6, 6, 4]}
TOWER = {
    "depth": 5, "hidden_size": 32, "intermediate_size": 56, "num_heads": 4, "in_channels": 3, "patch_size": 4,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 48, "num_position_embeddings": 49,
}  # fmt: skip
IDS = {"image_token_id": IMAGE, "video_token_id": 191, "vision_start_token_id": START, "vision_end_token_id": END}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
}  # fmt: skip
PARTIAL = {**ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25}


def qwen3_vl():
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    text = {**TEXT, "rope_parameters": {**ROPE, "mrope_interleaved": True}}
    tower = {**TOWER, "deepstack_visual_indexes": [1, 2, 3], "hidden_act": "gelu_pytorch_tanh"}
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=tower, **IDS))


def qwen3_vl_moe():
    from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    text = {**TEXT, **EXPERTS, "rope_parameters": {**ROPE, "mrope_interleaved": True}}
    tower = {**TOWER, "deepstack_visual_indexes": [0, 3], "hidden_act": "gelu_pytorch_tanh"}
    return Qwen3VLMoeForConditionalGeneration(Qwen3VLMoeConfig(text_config=text, vision_config=tower, **IDS))


def qwen2_5_vl():
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    text = {name: value for name, value in TEXT.items() if name != "head_dim"} | {"hidden_size": 128}
    tower = {**TOWER, "out_hidden_size": 128, "window_size": 16, "fullatt_block_indexes": [2, 4], "hidden_act": "silu"}
    del tower["num_position_embeddings"]
    config = Qwen2_5_VLConfig(text_config={**text, "rope_parameters": ROPE}, vision_config=tower, **IDS)
    return Qwen2_5_VLForConditionalGeneration(config)


def qwen3_5():
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    text = {**TEXT, **DELTA, "rope_parameters": {**PARTIAL, "mrope_interleaved": True}}
    return Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=TOWER, **IDS))


def qwen3_5_moe():
    from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

    text = {**TEXT, **DELTA, **EXPERTS, "shared_expert_intermediate_size": 40,
            "rope_parameters": {**PARTIAL, "mrope_interleaved": True}}
    return Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeConfig(text_config=text, vision_config=TOWER, **IDS))


def qwen2_vl():
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    text = {name: value for name, value in TEXT.items() if name != "head_dim"} | {"hidden_size": 128}
    tower = {"depth": 3, "embed_dim": 32, "hidden_size": 128, "mlp_ratio": 3, "num_heads": 4, "patch_size": 4}
    config = Qwen2VLConfig(text_config={**text, "rope_parameters": ROPE}, vision_config=tower, **IDS)
    return Qwen2VLForConditionalGeneration(config)


SIGLIP = {"hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 4, "patch_size": 4}


def gemma3():
    """An image has 16 tokens, and the window is shorter."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    rope = {"full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}  # fmt: skip
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    text = {**TEXT, "tie_word_embeddings": True, "sliding_window": 11, "query_pre_attn_scalar": 40,
            "layer_types": kinds, "rope_parameters": rope}  # fmt: skip
    tower = {**SIGLIP, "image_size": 32, "vision_use_head": False}
    return Gemma3ForConditionalGeneration(Gemma3Config(
        text_config=text, vision_config=tower, mm_tokens_per_image=16, image_token_index=IMAGE, boi_token_index=START,
        eoi_token_index=END,
    ))  # fmt: skip


def mistral3():
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    text = {**TEXT, "model_type": "mistral", "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    tower = {**SIGLIP, "image_size": 72, "hidden_act": "silu"}
    tower["head_dim"] = tower["hidden_size"] // tower["num_attention_heads"]
    return Mistral3ForConditionalGeneration(Mistral3Config(
        text_config=text, vision_config=tower, image_token_index=IMAGE, tie_word_embeddings=False,
    ))  # fmt: skip


def lighton_ocr():
    from transformers import LightOnOcrConfig, LightOnOcrForConditionalGeneration

    rope = {"rope_type": "default", "rope_theta": 1e6}
    text = {**TEXT, "model_type": "qwen3", "tie_word_embeddings": True, "rope_parameters": rope}
    tower = {**SIGLIP, "model_type": "pixtral", "image_size": 72, "hidden_act": "silu"}
    tower["head_dim"] = tower["hidden_size"] // tower["num_attention_heads"]
    return LightOnOcrForConditionalGeneration(LightOnOcrConfig(
        text_config=text, vision_config=tower, image_token_id=IMAGE, tie_word_embeddings=True,
    ))  # fmt: skip


GLM_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2], "partial_rotary_factor": 0.5}
GLM_TOWER = {name: value for name, value in TOWER.items() if name != "num_position_embeddings"} | {
    "hidden_act": "silu", "image_size": 28, "rms_norm_eps": 1e-5,
}  # fmt: skip
GLM_IDS = {"image_token_id": IMAGE, "video_token_id": 191, "image_start_token_id": START, "image_end_token_id": END}


def glm_ocr():
    from transformers import GlmOcrConfig, GlmOcrForConditionalGeneration

    text = {**TEXT, "rope_parameters": GLM_ROPE}
    return GlmOcrForConditionalGeneration(GlmOcrConfig(text_config=text, vision_config=GLM_TOWER, **GLM_IDS))


def glm4v():
    from transformers import Glm4vConfig, Glm4vForConditionalGeneration

    text = {name: value for name, value in TEXT.items() if name != "head_dim"} | {"hidden_size": 128}
    tower = {**GLM_TOWER, "out_hidden_size": 128}
    config = Glm4vConfig(text_config={**text, "rope_parameters": GLM_ROPE}, vision_config=tower, **GLM_IDS)
    return Glm4vForConditionalGeneration(config)


def paddleocr_vl():
    from transformers import PaddleOCRVLConfig, PaddleOCRVLForConditionalGeneration

    text = {**TEXT, "tie_word_embeddings": True, "use_bias": False, "rope_parameters": ROPE}
    tower = {**SIGLIP, "image_size": 28, "spatial_merge_size": 2}
    config = PaddleOCRVLConfig(text_config=text, vision_config=tower, tie_word_embeddings=True, **IDS)
    return PaddleOCRVLForConditionalGeneration(config)


GEMMA4 = {  # the window is shorter than an image, of at most 16 tokens
    **TEXT, "tie_word_embeddings": True, "sliding_window": 11, "global_head_dim": 64,
    "final_logit_softcapping": 5.0,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
}  # fmt: skip
GEMMA4_TOWER = {
    "hidden_size": 48, "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 20, "patch_size": 4, "pooling_kernel_size": 3,
    "position_embedding_size": 60,
}  # fmt: skip


def gemma4_moe():
    """A mixture, as 26B-A4B."""
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration

    text = {**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0,
            "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 20,
            "use_bidirectional_attention": "vision"}  # fmt: skip
    tower = {**GEMMA4_TOWER, "standardize": True}
    return Gemma4ForConditionalGeneration(Gemma4Config(text_config=text, vision_config=tower, **GEMMA4_IDS))


def gemma4_e():
    """Per-layer inputs, layers without keys and values, a tower with limits; its images are causal."""
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration

    text = {**GEMMA4, "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 200, "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True, "pad_token_id": 3}  # fmt: skip
    tower = {**GEMMA4_TOWER, "use_clipped_linears": True, "standardize": True}
    return Gemma4ForConditionalGeneration(Gemma4Config(text_config=text, vision_config=tower, **GEMMA4_IDS))


def gemma4_unified():
    from transformers import Gemma4UnifiedConfig, Gemma4UnifiedForConditionalGeneration

    tower = {"patch_size": 4, "pooling_kernel_size": 3, "mm_embed_dim": 40, "mm_posemb_size": 20,
             "output_proj_dims": 40}  # fmt: skip
    text = {**GEMMA4, "sliding_window": 4096}  # longer than any request, so that the engine drops it
    config = Gemma4UnifiedConfig(text_config=text, vision_config=tower, **GEMMA4_IDS)
    return Gemma4UnifiedForConditionalGeneration(config)


GEMMA4_IDS = {
    "image_token_id": IMAGE, "video_token_id": 191, "audio_token_id": 196, "boi_token_id": START, "eoi_token_id": END,
}  # fmt: skip
FAMILIES = {each.__name__: each for each in (
    qwen3_vl, qwen3_vl_moe, qwen2_5_vl, qwen3_5, qwen3_5_moe, qwen2_vl, gemma3, mistral3, lighton_ocr, glm_ocr, glm4v,
    paddleocr_vl, gemma4_moe, gemma4_e, gemma4_unified,
)}  # fmt: skip


def make_checkpoint(family: str, path, seed: int = 0):
    """Save a random model of the family, and an image processor; returns the model."""
    from transformers.models.gemma3 import Gemma3ImageProcessorPil
    from transformers.models.gemma4 import Gemma4ImageProcessorPil
    from transformers.models.glm46v import Glm46VImageProcessorPil
    from transformers.models.paddleocr_vl import PaddleOCRVLImageProcessorPil
    from transformers.models.pixtral import PixtralImageProcessorPil
    from transformers.models.qwen2_vl import Qwen2VLImageProcessorPil

    torch.manual_seed(seed)
    model = FAMILIES[family]().float().eval()
    for name, param in model.named_parameters():
        if "norm" in name and name.endswith("weight"):
            has_offset = family in ("gemma3", "qwen3_5", "qwen3_5_moe") and not re.search("visual|vision_tower", name)
            param.data.normal_(0 if has_offset else 1, 0.1)
        elif not name.endswith(("A_log", "dt_bias")):
            param.data.normal_(0, 0.15)
        if "scal" in name:
            param.data.add_(1)
    for name, x in model.named_buffers():
        if name.endswith(("layer_scalar", "std_bias", "std_scale")):
            x.normal_("bias" not in name, 0.2)
        elif name.endswith(("put_min", "put_max")):
            x.fill_((1 if name.endswith("max") else -1) * (0.9 + 0.6 * torch.rand(())))
    model.lm_head.weight.data[IMAGE] = 0  # seldom sampled: transformers would take it for an image
    model.save_pretrained(path)
    size = {"shortest_edge": 64, "longest_edge": 4096 if "glm" in family else 2048}  # GLM counts two frames
    for kind in ("_pil", "") if find_spec("torchvision") else ("_pil",):
        module = import_module(f"transformers.models.gemma4.image_processing{kind}_gemma4")
        module._SUPPORTED_SOFT_TOKENS = (9, 16)  # else an image has at least 60
    gemma4 = Gemma4ImageProcessorPil, {"patch_size": 4, "pooling_kernel_size": 3, "max_soft_tokens": 16}
    processor, options = {
        **dict.fromkeys(("gemma4_moe", "gemma4_e", "gemma4_unified"), gemma4),
        "gemma3": (Gemma3ImageProcessorPil, {"size": {"height": 32, "width": 32}}),
        "mistral3": (PixtralImageProcessorPil, {"patch_size": 4, "size": {"longest_edge": 72}}),
        "lighton_ocr": (PixtralImageProcessorPil, {"patch_size": 4, "size": {"longest_edge": 72}}),
        "glm_ocr": (Glm46VImageProcessorPil, {"patch_size": 4, "size": size}),
        "glm4v": (Glm46VImageProcessorPil, {"patch_size": 4, "size": size}),
        "paddleocr_vl": (PaddleOCRVLImageProcessorPil, {"patch_size": 4, "size": size}),
    }.get(family, (Qwen2VLImageProcessorPil, {"patch_size": 4, "size": size}))
    processor(**options).save_pretrained(path)
    save_tokenizer(family, path)
    return model


CHARACTERS = [chr(i) for i in range(32, 127)] + ["\n"]
SPECIAL = {"<|image_pad|>": IMAGE, "<|video_pad|>": 191, "<|vision_start|>": START, "<|vision_end|>": END,
           "<|im_start|>": 194, "<|im_end|>": 195}  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def add_tokenizer(path) -> None:
    """A token for each character of ASCII, the special ones of Qwen's families, and their chat template."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    names = {i: name for name, i in SPECIAL.items()}
    vocab = {name: i for i, name in enumerate(CHARACTERS)}
    vocab |= {names.get(i, f"<{i}>"): i for i in range(len(vocab), TEXT["vocab_size"])}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<199>"))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(list(SPECIAL))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=TEMPLATE)
    fast.save_pretrained(path)


def save_tokenizer(family: str, path):
    """A tokenizer of letters and newlines, which merges newlines as Gemma's does, and knows the tokens of images."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    newlines = ["\n" * n for n in (1, 2, 4)]
    vocab = {text: i for i, text in enumerate([*newlines, *" .abcdefghijklmnopqrstuvwxyz"], 3)}
    vocab |= {f"<{i}>": i for i in range(190) if i not in vocab.values()}
    special = {
        "gemma3": {"<image_soft_token>": IMAGE, "<start_of_image>": START, "<end_of_image>": END},
        "mistral3": {"[IMG]": IMAGE, "[IMG_BREAK]": ROW_END, "[IMG_END]": LAST_END},
        "gemma4": {"<|image|>": IMAGE, "<|image>": START, "<image|>": END},
    }.get(family.partition("_")[0] if "gemma4" in family else family, {"<|image_pad|>": IMAGE})
    vocab |= special
    tokenizer = Tokenizer(models.BPE(vocab, [("\n", "\n"), ("\n\n", "\n\n")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": [*special]})
    tokenizer.save_pretrained(path)


def image(height: int, width: int, seed: int = 0):
    """A PIL image of smooth noise."""
    from PIL import Image

    generator = np.random.default_rng(seed)
    small = generator.integers(0, 256, (3, 4, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def joined(pixels, merge=3, side=4):
    """The squares of pixels that are tokens of Gemma 4 12B, row by row, and their columns and rows."""
    values, places = [], []
    for patches, at in zip(pixels["pixel_values"], pixels["image_position_ids"].tolist(), strict=True):
        found = {(x, y): patch.view(side, side, 3) for (x, y), patch in zip(at, patches, strict=True) if x >= 0}
        tokens = sorted({(y // merge, x // merge) for x, y in found})
        rows = [
            torch.cat([torch.cat([found[merge * x + i, merge * y + j] for i in range(merge)], 1) for j in range(merge)])
            for y, x in tokens
        ]
        missing = 16 - len(tokens)
        values.append(torch.stack([row.flatten() for row in rows] + [torch.zeros(len(rows[0].flatten()))] * missing))
        places.append([[x, y] for y, x in tokens] + [[-1, -1]] * missing)
    return {"pixel_values": torch.stack(values), "image_position_ids": torch.tensor(places)}


class Twin:
    """transformers' answers for prompts with images."""

    def __init__(self, model, path):
        from transformers import AutoImageProcessor
        from transformers.models.gemma4 import Gemma4ImageProcessorPil

        is_unified = model.config.model_type == "gemma4_unified"  # whose own processor needs torchvision
        processor = Gemma4ImageProcessorPil if is_unified else AutoImageProcessor
        self.model, self.processor = model, processor.from_pretrained(path)

    def inputs(self, ids, images):
        if not images:
            return {"input_ids": torch.tensor([ids])}
        by_sizes = self.model.config.model_type in ("mistral3", "lighton_ocr")
        patch = {"patch_size": 8} if by_sizes else {}  # of the tower, times the merge
        pixels = dict(self.processor(images=images, return_tensors="pt", **patch))
        parts = [[IMAGE] * 16] * len(pixels.pop("num_crops", []))
        parts += [[IMAGE] * int(number) for number in pixels.pop("num_soft_tokens_per_image", [])]
        if self.model.config.model_type == "gemma4_unified":
            pixels = joined(pixels)
        parts += [[IMAGE] * int(grid.prod() // 4) for grid in pixels.get("image_grid_thw", [])]
        for height, width in pixels.get("image_sizes", torch.empty(0, 2)).tolist():
            marks = [ROW_END] if self.model.config.model_type == "mistral3" else []
            parts.append(([IMAGE] * (width // 8) + marks) * (height // 8))
            parts[-1][-1] = LAST_END if marks else IMAGE
        parts = iter(parts)
        expanded = [token for given in ids for token in (next(parts) if given == IMAGE else [given])]
        types = torch.tensor([[int(token == IMAGE) for token in expanded]])
        name = None if by_sizes else "mm_token_type_ids"
        name = "token_type_ids" if self.model.config.model_type == "gemma3" else name
        inputs = {"input_ids": torch.tensor([expanded]), **({name: types} if name else {}), **pixels}
        if self.model.config.model_type == "gemma4_unified":
            # its forward pass would make images attend both ways in full layers, too, unlike ``generate`` with a static
            # cache, unlike transformers' other Gemma 4, and unlike its makers' code
            places = torch.arange(len(expanded))[None]
            inputs["attention_mask"] = self.model.create_masks_for_generate(
                self.model.config, torch.empty(1, len(expanded), 0), None, None, places, mm_token_type_ids=types
            )
        return inputs

    def logits(self, ids, images):
        """Of every position, fp32 [T, V]."""
        with torch.inference_mode():
            self.model.model.rope_deltas = None
            return self.model(**self.inputs(ids, images)).logits[0].float()

    def greedy(self, ids, images, num_tokens):
        """The next tokens, a forward pass of all tokens each: ``generate`` misplaces tokens behind a last image."""
        ids = list(ids)
        for _ in range(num_tokens):
            ids.append(int(self.logits(ids, images)[-1].argmax()))
        return ids[-num_tokens:]

    def greedy_text(self, ids, num_tokens):
        """The same for text, whose placeholders are ordinary tokens."""
        with torch.inference_mode():
            output = self.model.generate(torch.tensor([ids]), max_new_tokens=num_tokens, do_sample=False)
        return output[0, len(ids) :].tolist()
