"""Tiny random models with vision towers, made by transformers, no two dimensions equal; and transformers' answers."""

import numpy as np
import torch

IMAGE, START, END = 190, 192, 193
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


FAMILIES = {each.__name__: each for each in (qwen3_vl, qwen3_vl_moe, qwen2_5_vl, qwen3_5, qwen3_5_moe)}


def make_checkpoint(family: str, path, seed: int = 0):
    """Save a random model of the family, and an image processor; returns the model."""
    from transformers.models.qwen2_vl import Qwen2VLImageProcessorPil

    torch.manual_seed(seed)
    model = FAMILIES[family]().float().eval()
    for name, param in model.named_parameters():
        if "norm" in name and name.endswith("weight"):
            param.data.normal_(0 if "qwen3_5" in family and "visual" not in name else 1, 0.1)
        elif not name.endswith(("A_log", "dt_bias")):
            param.data.normal_(0, 0.15)
    model.lm_head.weight.data[IMAGE] = 0  # seldom sampled: transformers would take it for an image
    model.save_pretrained(path)
    Qwen2VLImageProcessorPil(patch_size=4, size={"shortest_edge": 64, "longest_edge": 2048}).save_pretrained(path)
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


def image(height: int, width: int, seed: int = 0):
    """A PIL image of smooth noise."""
    from PIL import Image

    generator = np.random.default_rng(seed)
    small = generator.integers(0, 256, (3, 4, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


class Twin:
    """transformers' answers for prompts with images."""

    def __init__(self, model, path):
        from transformers import AutoImageProcessor

        self.model, self.processor = model, AutoImageProcessor.from_pretrained(path, backend="pil")

    def inputs(self, ids, images):
        pixels = self.processor(images=images, return_tensors="pt") if images else {}
        expanded, grids = [], iter(pixels.get("image_grid_thw", []))
        for token in ids:
            expanded += [token] * (int(next(grids).prod()) // 4 if token == IMAGE else 1)
        types = torch.tensor([[int(token == IMAGE) for token in expanded]])
        extra = {"mm_token_type_ids": types} if images else {}
        return {"input_ids": torch.tensor([expanded]), **extra, **pixels}

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
