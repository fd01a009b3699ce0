"""Every family with a vision tower, next to transformers; and what some families have of their own."""

import json
import random
import re
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import vision_families
from helpers import generate_with_logits, needs, refuses, tokens_of
from safetensors.torch import load_file, save_file
from vision_families import END, FAMILIES, IMAGE, LAST_END, ROW_END, START, Twin, image

from nanovllm import LLM, CheckpointError, EngineError, SamplingParams
from nanovllm.distributed.group import SINGLE_RANK
from nanovllm.engine.images.processing import ImageProcessor
from nanovllm.models.config_reader import read_model_config
from nanovllm.models.decoder import CausalLM
from nanovllm.models.families import TOWER
from nanovllm.models.loader import load_model
from nanovllm.models.vision import VisionConfig
from nanovllm.models.vision_tower import VisionTower, numbers_of

pytestmark = needs("engine.images")
PAGE, WIDE, TALL = image(40, 24, 1), image(33, 70, 2), image(90, 18, 3)
PROMPTS = [  # token ids with a placeholder for each image, and the images: several, none, first, last, equal ones
    ([5, 6, START, IMAGE, END, 9, START, IMAGE, END, 7, 8, 3], [PAGE, WIDE]),
    ([4, 3, 2], []),
    ([IMAGE, 9, 8], [WIDE]),
    ([9, 8, 7, START, IMAGE], [PAGE]),
    ([IMAGE, 1, 7, 1, 7] * 3, [PAGE, TALL, PAGE]),
]
N = 5
GREEDY = SamplingParams(temperature=0, max_tokens=N, ignore_eos=True)


def given(ids, images):
    return {"prompt_token_ids": ids, "multi_modal_data": {"image": images}}


def engine(path, **options):
    options = {"kvcache_block_size": 16, "dtype": "float32", "device": "cpu", "quiet": True} | options
    return LLM(str(path), **options)


def made(family, tmp_path_factory, seed=0):
    path = tmp_path_factory.mktemp(family)
    return str(path), Twin(vision_families.make_checkpoint(family, path, seed), path)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """shared(family, seed=0) -> directory, twin, and the tokens that transformers continues PROMPTS with.

    They are made once for all tests, so no test may change them.
    """

    @cache
    def make(family, seed=0):
        path, twin = made(family, tmp_path_factory, seed)
        return path, twin, [twin.greedy(ids, images, N) for ids, images in PROMPTS]

    return make


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request, shared):
    return shared(request.param)


@pytest.fixture(scope="module")
def gemma3(shared):
    return shared("gemma3")[:2]


@pytest.fixture(scope="module")
def mistral3(shared):
    return shared("mistral3")[:2]


@pytest.mark.parametrize("options", [
    {},
    {"max_num_batched_tokens": 21, "max_num_seqs": 4},  # images are cut, or wait for the next launch
    {"max_num_batched_tokens": 40, "max_num_seqs": 2, "enable_prefix_caching": False},
], ids=["plain", "chunks", "uncached"])  # fmt: skip
def test_tokens_are_those_of_transformers(checkpoint, options):
    """All in a batch, and twice: the second time beginnings come from the prefix cache, if there is one."""
    path, _, expected = checkpoint
    with engine(path, **options) as llm:
        for _ in range(2):
            assert tokens_of(llm.generate([given(*each) for each in PROMPTS], GREEDY, use_tqdm=False)) == expected


@pytest.mark.parametrize("page", [PAGE, WIDE, TALL], ids=["page", "wide", "tall"])
def test_levels_become_the_numbers_of_the_processor(checkpoint, page):
    """Threads leave rescaling and normalization to the tower, for each processor of the families; bit by bit."""
    path, vision = checkpoint[0], VisionConfig.read(checkpoint[0])
    processor = ImageProcessor(path, vision.processor_options, vision)
    tensors, expected = processor(page), processor.numbers(page)
    levels, numbers = tensors["pixel_values"], expected["pixel_values"]
    assert levels.dtype == torch.uint8 and levels.numel() <= numbers.numel() and tensors["table"].shape == (3, 256)
    assert torch.equal(numbers_of(levels, tensors["table"], numbers.shape[1:]), numbers)
    sizes = expected.keys() - {"pixel_values"}
    assert tensors.keys() == {"pixel_values", "table", *sizes}
    assert all(np.array_equal(tensors[name], expected[name]) for name in sizes)


@pytest.mark.parametrize("family", ["gemma3", "mistral3", "gemma4_e"])
def test_two_ranks(family, shared):
    """Rank 0 has the tower, and takes its new weights from files and from pairs."""
    path, twin, old_tokens = shared(family)
    new_path, _, new_tokens = shared(family, seed=1)
    with engine(path, tensor_parallel_size=2, max_num_batched_tokens=30, max_num_seqs=8) as llm:
        assert answers(llm) == old_tokens
        llm.update_weights(new_path)
        assert answers(llm) == new_tokens
        llm.sleep(2)
        llm.wake_up()
        llm.update_weights(tensors_of(twin.model))
        assert answers(llm) == old_tokens


def test_logits_are_those_of_transformers(checkpoint):
    path, twin, _ = checkpoint
    ids, images = PROMPTS[0]
    with engine(path, max_num_seqs=1) as llm:
        prompt = llm._inputs.attachments.encode(given(ids, images))[1].attachment().prompt_ids.tolist()
        _, (logits,) = generate_with_logits_of(llm, prompt, images)
    expected = twin.logits(ids, images)[-1]
    assert (logits[0] - expected).abs().max() <= 1e-5 * expected.abs().max()


def generate_with_logits_of(llm, prompt, images):
    """``generate_with_logits`` of an expanded prompt with images."""
    plain = llm.generate

    def generate(prompts, *args, **kwargs):
        return plain([given(each, images) for each in prompts], *args, **kwargs)

    llm.generate = generate
    return generate_with_logits(llm, [prompt], 1)


MALFORMED = -7000, 10**9, "x", None, [2.5], {}, float("nan")
SIZES = 0, *MALFORMED
OF_QWEN = dict.fromkeys(("depth", "num_heads", "hidden_size", "in_channels", "patch_size", "spatial_merge_size"), SIZES)
LATER = OF_QWEN | dict.fromkeys(("intermediate_size", "temporal_patch_size"), SIZES) | {
    "num_position_embeddings": SIZES, "out_hidden_size": (*SIZES, 64), "hidden_act": ("nope", 0, None, []),
    "num_heads": (*SIZES, 3, 7, 16), "rope_parameters": ({"rope_theta": 0}, [], "x"), "model_type": (),
}  # fmt: skip
DEEP = LATER | {"deepstack_visual_indexes": ([5], [1, 1], [-1], "x")}
OF_OTHERS = dict.fromkeys((
    "num_hidden_layers", "hidden_size", "intermediate_size", "num_channels", "patch_size", "image_size"
), SIZES) | {"hidden_act": ("nope", 0, None, [])}  # fmt: skip
OF_PIXTRAL = OF_OTHERS | {
    "num_attention_heads": (*SIZES, 3, 7, 16), "head_dim": (*SIZES, 1, 3, 16), "spatial_merge_size": SIZES,
    "rope_parameters": ({"rope_theta": 0}, [], "x"),
}  # fmt: skip
OF_GLM = {name: values for name, values in LATER.items() if name != "num_position_embeddings"} | {
    "image_size": SIZES, "rms_norm_eps": SIZES,
}  # fmt: skip
# family -> field of vision_config, or of config.json itself, and values that it cannot have
HOSTILE = {
    "qwen2_vl": OF_QWEN | {"embed_dim": SIZES, "mlp_ratio": SIZES, "hidden_act": ("nope", 0), "num_heads": (0, 3, 16)},
    "qwen2_5_vl": {name: values for name, values in LATER.items() if name != "num_position_embeddings"} | {
        "window_size": (*SIZES, 1, 7), "fullatt_block_indexes": ([-1], "x", [0.5]),
    },
    "qwen3_vl": DEEP, "qwen3_vl_moe": DEEP, "qwen3_5": LATER, "qwen3_5_moe": LATER,
    "gemma3": OF_OTHERS | {
        "num_attention_heads": (*SIZES, 3, 7), "layer_norm_eps": SIZES, "mm_tokens_per_image": (*SIZES, 9, 15),
    },
    "mistral3": OF_PIXTRAL | {
        "projector_hidden_act": ("nope", 0), "vision_feature_layer": (0, [], *MALFORMED, 4, -5, [0, 9]),
    },
    "gemma4": dict.fromkeys((
        "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
        "patch_size", "pooling_kernel_size", "position_embedding_size", "rms_norm_eps",
    ), SIZES) | {
        "head_dim": (*SIZES, 6), "num_key_value_heads": (*SIZES, 3), "hidden_activation": ("nope", 0, None, []),
        "standardize": (2, "x", None), "use_clipped_linears": (2, "x", None),
        "rope_parameters": ({"rope_theta": 0}, {"rope_type": "yarn", "rope_theta": 1.0}, [], "x"),
    },
    "gemma4_unified": dict.fromkeys((
        "patch_size", "pooling_kernel_size", "mm_posemb_size", "rms_norm_eps",
    ), SIZES) | dict.fromkeys(("mm_embed_dim", "output_proj_dims"), (*SIZES, 39)),
    "lighton_ocr": OF_PIXTRAL, "glm_ocr": OF_GLM, "glm4v": OF_GLM,
    "paddleocr_vl": OF_OTHERS | {
        "num_attention_heads": (*SIZES, 3, 7, 16), "layer_norm_eps": SIZES, "spatial_merge_size": SIZES,
        "rope_parameters": ({"rope_theta": 0}, [], "x"),
    },
}  # fmt: skip


def test_impossible_fields_of_vision_config(checkpoint, tmp_path):
    """transformers raised errors of its own, or built layers without end; ours names the field. With an odd
    number that is possible by itself there is an error of ours, too, or an image passes."""
    path, _, _ = checkpoint
    decoder = CausalLM(read_model_config(path), None, SINGLE_RANK)
    original, copy = json.loads(Path(path, "config.json").read_text()), str(shutil.copytree(path, tmp_path / "copy"))
    for field, values in HOSTILE[original["model_type"]].items():
        is_outside = field in original or field in ("vision_feature_layer", "projector_hidden_act")
        for value in (*values, 5):
            changed = {field: value} if is_outside else {"vision_config": original["vision_config"] | {field: value}}
            Path(copy, "config.json").write_text(json.dumps(original | changed))
            try:
                vision = VisionConfig.read(copy)
                tower = VisionTower(vision, copy, torch.float32)
                load_model(decoder, copy, extra=[tower])
                tower([tower.blank(4, torch.device("cpu"))])
            except CheckpointError as error:
                assert value not in values or field in str(error), (field, value)
            else:
                assert value not in values, (field, value)


def test_a_tower_larger_than_its_tensors(tmp_path):
    """Its memory was taken before anybody looked at its tensors: 2 * 5 * 32 * 65,535 numbers, say."""
    vision_families.make_checkpoint("qwen3_vl", tmp_path)
    file = tmp_path / "config.json"
    raw = json.loads(file.read_text())
    raw["vision_config"]["intermediate_size"] = 65535
    file.write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=r"vision_config has a tower of 21,\d+,\d+ weights; .* has 1\d\d,\d+\."):
        VisionTower(VisionConfig.read(str(tmp_path)), str(tmp_path), torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, tolerance", [("float32", 2e-3), ("bfloat16", 0.1)])
def test_on_a_gpu(checkpoint, dtype, tolerance):
    """Mean error of the prompt's log-probabilities, and of tokens in a mixed batch there are as many.

    Most of the error in fp32 is of pixels: where torchvision is installed it resizes for the engine, PIL for the twin.
    """
    path, twin, _ = checkpoint
    params = SamplingParams(temperature=0, max_tokens=N, ignore_eos=True, prompt_logprobs=0)
    with engine(path, device="cuda", dtype=dtype, kvcache_block_size=16, max_num_batched_tokens=64) as llm:
        outputs = llm.generate([given(*each) for each in PROMPTS], params, use_tqdm=False)
    for output, (ids, images) in zip(outputs, PROMPTS, strict=True):
        tokens = output.prompt_token_ids
        want = twin.logits(ids, images).log_softmax(-1)[range(len(tokens) - 1), tokens[1:]]
        pairs = zip(output.prompt_logprobs[1:], tokens[1:], strict=True)
        found = torch.tensor([logprobs[token].logprob for logprobs, token in pairs])
        # another rounding may choose other experts
        assert (found - want).abs().mean() < tolerance * (10 if "moe" in path else 1)
        assert len(output.outputs[0].token_ids) == N


def test_blank_pixels(checkpoint):
    """The start on a GPU measures the tower with them."""
    path, _, _ = checkpoint
    vision = VisionConfig.read(path)
    tower = VisionTower(vision, path, torch.float32)
    tower.init_dummy(0)
    features = tower([tower.blank(50, torch.device("cpu"))])
    num_features, width = features.shape
    assert 50 <= num_features < 150 and width % tower.model.config.text_config.hidden_size == 0
    assert torch.isfinite(features).all()


def test_dummy_weights(checkpoint):
    path, _, _ = checkpoint
    with engine(path, load_format="dummy") as llm:
        output = llm.generate(given(*PROMPTS[0]), GREEDY, use_tqdm=False)[0]
    assert len(output.outputs[0].token_ids) == N


@pytest.mark.parametrize("architecture, fields, expected", [
    ("Gemma3ForConditionalGeneration", {
        "image_token_index": 262144, "mm_tokens_per_image": 256, "text_config": {},
        "vision_config": {"hidden_size": 1152, "image_size": 896, "patch_size": 14, "vision_use_head": False},
    }, (262144, 4, 14, 896, 256)),
    ("Mistral3ForConditionalGeneration", {
        "image_token_index": 10, "spatial_merge_size": 2, "vision_feature_layer": -1, "text_config": {},
        "vision_config": {"model_type": "pixtral", "hidden_size": 1024, "image_size": 1540, "patch_size": 14},
    }, (10, 2, 14, 1540, 0)),
    ("Qwen2VLForConditionalGeneration", {
        "image_token_id": 151655, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vision_config": {"embed_dim": 1280, "hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2},
    }, (151655, 2, 14, 0, 0)),
], ids=["gemma-3-4b-it", "Mistral-Small-3.1", "Qwen2-VL-7B"])  # fmt: skip
def test_published_fields(architecture, fields, expected, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], **fields}))
    vision = VisionConfig.read(str(tmp_path), is_dummy=True)
    assert vision[1:6] == expected  # from the placeholder to the tokens of an image


# ---------------------------------------------------------------- new weights of the tower


@pytest.fixture(scope="module", params=[name for name in FAMILIES if name != "gemma4_moe"])  # its tower is gemma4_e's
def trained(request, shared):
    """Directory of a checkpoint; directory, transformers' model and answers of another one of the same shape."""
    path, _, old_tokens = shared(request.param)
    new_path, new, new_tokens = shared(request.param, seed=1)
    return path, old_tokens, new_path, new.model, new_tokens


def answers(llm):
    return tokens_of(llm.generate([given(*each) for each in PROMPTS], GREEDY, use_tqdm=False))


def tensors_of(model):
    """The weights of transformers' model by their names in memory, those that it calls buffers, too."""
    names = {*dict(model.named_parameters()), *dict(model.named_buffers())}
    return {name: x for name, x in model.state_dict().items() if name in names}


def tower_of(model):
    """The weights of transformers' model that belong to its tower and projector, by their names in memory."""
    return {name: x for name, x in tensors_of(model).items() if re.fullmatch(TOWER, name)}


def name_here(name):
    """The name of a tower's tensor in messages."""
    return name.replace("vision_tower.vision_model.", "vision_tower.").replace(".multimodal_embedder.", ".")


def test_update_weights_takes_the_tower(trained):
    """It kept its weights, so that a path gave one checkpoint's decoder behind the other's tower.

    By path, by names in memory in float64, and by published names; the images are in the prefix cache each time.
    """
    path, old, new_path, model, new = trained
    published = load_file(f"{path}/model.safetensors")
    with engine(path) as llm:
        assert answers(llm) == answers(llm) == old != new
        names = llm.update_weights(new_path)
        assert answers(llm) == new
        assert llm.update_weights(reversed(published.items())) == names
        assert answers(llm) == old
        llm.update_weights((name, param.double()) for name, param in tensors_of(model).items())
        assert answers(llm) == new
        assert llm.update_weights(lora=None) == names  # none of them is the checkpoint's
        assert answers(llm) == old


def test_an_update_of_the_tower_alone_or_last(trained):
    """``partial`` takes it in pieces; without it, and after ``sleep(2)``, its tensors are missed like others."""
    path, old, _, model, new = trained
    tower = tower_of(model)
    with engine(path) as llm:
        assert answers(llm) == old
        for name, param in tower.items():
            llm.update_weights({name: param}, partial=True)
        mixed = answers(llm)
        assert mixed not in (old, new)
        rest = [(name, param) for name, param in tensors_of(model).items() if name not in tower]
        llm.update_weights(rest, partial=True)
        assert answers(llm) == new
        llm.sleep(2)
        llm.wake_up()
        llm.update_weights(iter(rest), partial=True)
        first = min(map(name_here, tower))
        missing = f"{len(tower)} tensors are missing, among them {first}"
        with pytest.raises(EngineError, match=f"dropped by sleep.* {missing}"):
            answers(llm)
        llm.update_weights(tower, partial=True)
        assert answers(llm) == new
        with pytest.raises(CheckpointError, match=f"{missing}.*partial=True"):
            llm.update_weights(rest)
        with pytest.raises(CheckpointError, match=r"'visual\.nothing' is twice there, or unknown"):
            llm.update_weights({"visual.nothing": torch.zeros(1)}, partial=True)
        llm.update_weights(path)
        assert answers(llm) == old
        with pytest.raises(CheckpointError, match=r"has shape \[3, 3\], expected \["):
            llm.update_weights({first: torch.zeros(3, 3)}, partial=True)
        assert answers(llm) == old  # nothing was written


@pytest.mark.gpu
def test_the_tower_sleeps_and_is_updated_on_a_gpu(trained):
    """Its MLPs are padded there; the answers are those of a new engine."""
    path, _, new_path, model, _ = trained
    with engine(new_path, device="cuda") as llm:
        expected = answers(llm)
    with engine(path, device="cuda") as llm:
        before = answers(llm)
        tower = next(part.module for part in llm.model_runner.parts if part.module is not None)
        for level in (1, 2):
            llm.sleep(level)
            assert not any(param.untyped_storage().nbytes() for param in tower.parameters())
            llm.wake_up()
            if level == 2:
                llm.update_weights(tensors_of(model))
            assert answers(llm) == (before if level == 1 else expected)


@pytest.mark.parametrize("form", ["lora", "modules_to_save"])
def test_adapters_of_the_tower_are_refused(form, trained, tmp_path):
    """They were taken as if they had changed the decoder alone; also names that no model has."""
    path, _, _, model, _ = trained
    matrices = {name: param for name, param in tensors_of(model).items() if param.ndim == 2}
    decoder = next(name for name in matrices if "q_proj" in name and "vision" not in name)
    names = [name for name in tower_of(model) if name in matrices and name.endswith(".weight")]
    shapes = {name: matrices[name].shape for name in (names[0], names[-1], decoder)} | {"visual.nothing.weight": (4, 6)}
    taken = f"base_model.model.{decoder}", torch.zeros(shapes.pop(decoder))

    def tensors(name, shape):
        if form == "modules_to_save":
            return {name: torch.zeros(shape)}
        factors = {"A": torch.zeros(2, shape[1]), "B": torch.zeros(shape[0], 2)}
        return {name.replace("weight", f"lora_{letter}.weight"): factor for letter, factor in factors.items()}

    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with engine(path) as llm:
        for name, shape in shapes.items():
            given = {f"base_model.model.{name}": x for name, x in tensors(name, shape).items()}
            save_file(dict([taken]) | given, tmp_path / "adapter_model.safetensors")
            here = name_here(name)
            for refuse in (lambda: llm.update_weights(lora=tmp_path), lambda: engine(path, lora=tmp_path)):
                with pytest.raises(CheckpointError, match=f"none of 1 tensors that the .*{here}.*merge_and_unload"):
                    refuse()
        answers(llm)  # nothing was written
        save_file(dict([taken]), tmp_path / "adapter_model.safetensors")
        assert len(llm.update_weights(lora=tmp_path)) == 1


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, about PEFT
@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_adapters_of_the_decoder(family, tmp_path_factory, tmp_path):
    """PEFT names their modules as they are in memory, and the published tensors have other names."""
    import peft

    path, twin = made(family, tmp_path_factory)
    options = {"target_modules": "all-linear", "exclude_modules": r".*(visual|vision_tower).*"}
    config = peft.LoraConfig(r=2, lora_alpha=6, **options)
    adapted = peft.get_peft_model(twin.model, config)
    for name, param in adapted.named_parameters():
        if "lora_" in name:
            param.data.normal_(0, 0.2, generator=torch.Generator().manual_seed(len(name)))
    adapted.save_pretrained(tmp_path)
    twin.model = adapted.merge_and_unload()
    expected = [twin.greedy(*prompt, N) for prompt in PROMPTS]
    with engine(path, lora=tmp_path) as llm:
        assert answers(llm) == expected
        llm.update_weights(lora=None)
        assert answers(llm) != expected


def test_features_of_an_aborted_request_are_forgotten(trained):
    """Those of an image whose last tokens were to come with the next launch are the old tower's."""
    path, _, new_path, _, _ = trained
    prompt = given([IMAGE, 9, 8], [image(64, 64, 7)])  # 64 tokens, or Gemma's 16
    options = {"max_num_batched_tokens": 20, "max_num_seqs": 4, "enable_prefix_caching": False}
    with engine(new_path, **options) as llm:
        (expected,) = tokens_of(llm.generate([prompt], GREEDY, use_tqdm=False))
    with engine(path, **options) as llm:
        request = llm.add_request(prompt, GREEDY)
        llm.step()
        llm.abort(request)
        llm.update_weights(new_path)
        assert tokens_of(llm.generate([prompt], GREEDY, use_tqdm=False)) == [expected]


# ---------------------------------------------------------------- Gemma 3


def chunks_of(llm, prompts):
    """The token ids of each chunk of all prefills, and the completions."""
    found, forward = [], llm.model_runner.forward

    def record(batch):
        if not batch.is_decode:
            ends = np.cumsum(batch.stops - batch.starts)
            found.extend(np.split(batch.token_ids, ends[:-1]))
        return forward(batch)

    llm.model_runner.forward = record
    return found, tokens_of(llm.generate(prompts, GREEDY, use_tqdm=False))


@pytest.mark.parametrize("budget", [16, 17, 23, 31, 50])
def test_no_chunk_ends_within_an_image_that_attends_both_ways(gemma3, budget):
    path, twin = gemma3
    rng, images = random.Random(budget), [PAGE, WIDE, TALL]
    cases = []
    for _ in range(8):
        chosen = rng.choices(images, k=rng.randrange(4))
        text = [[rng.randrange(3, 180) for _ in range(rng.randrange(1, 30))] for _ in range(len(chosen) + 1)]
        ids = sum(([START, IMAGE, END, *part] for part in text[1:]), text[0])
        cases.append((ids, chosen))
    options = {"max_num_batched_tokens": budget, "max_num_seqs": 3, "enable_prefix_caching": bool(budget % 2)}
    with engine(path, **options) as llm:
        chunks, found = chunks_of(llm, [given(*case) for case in cases])
    assert found == [twin.greedy(*case, N) for case in cases]
    assert all(0 < len(chunk) <= budget for chunk in chunks)
    if not options["enable_prefix_caching"]:
        assert all(np.count_nonzero(chunk < 0) % 16 == 0 for chunk in chunks)
    assert sum(np.count_nonzero(chunk < 0) for chunk in chunks) > 0


def test_a_hit_may_end_within_an_image_that_attends_both_ways(gemma3):
    """The keys found were computed with the whole of it, and its other tokens see these and each other."""
    path, twin = gemma3
    first = [*range(3, 12), START, IMAGE, END, 7, 8], [PAGE]
    second = [*range(3, 12), START, IMAGE, END, 9, 8, 3, 5], [PAGE]
    with engine(path, max_num_batched_tokens=18, max_num_seqs=2) as llm:
        for case, num_cached in ((first, [0]), (second, range(16, 26))):
            output = llm.generate(given(*case), GREEDY, use_tqdm=False)[0]
            assert output.num_cached_tokens in num_cached
            assert output.outputs[0].token_ids == twin.greedy(*case, N)
    with engine(path, enable_prefix_caching=False) as llm:
        causal = llm.generate(given(*first), GREEDY, use_tqdm=False)[0]
    assert causal.outputs[0].token_ids == twin.greedy(*first, N)


def test_an_image_longer_than_a_launch_is_refused(gemma3):
    path, twin = gemma3
    with engine(path, max_num_batched_tokens=15, max_num_seqs=4) as llm:
        with refuses("one has 16 tokens, which attend each other both ways, and a launch takes 15"):
            llm.generate(given([IMAGE, 5], [PAGE]), GREEDY)
        assert tokens_of(llm.generate([[4, 3, 2]], GREEDY, use_tqdm=False)) == [twin.greedy([4, 3, 2], [], N)]


def test_a_waiting_image_can_be_aborted(gemma3):
    """It has blocks and a request slot, and none of its tokens was computed."""
    path, _ = gemma3
    with engine(path, max_num_batched_tokens=20, max_num_seqs=2, enable_prefix_caching=False) as llm:
        num_free = llm.scheduler.block_manager.num_available
        text = llm.add_request([5, 6, 7, 8, 9], GREEDY)
        request = llm.add_request(given([IMAGE, 5], [PAGE]), GREEDY)
        llm.step()
        llm.abort(request)
        outputs = {}
        while not llm.is_finished():
            outputs |= dict(llm.step()[0])
        assert text in outputs and llm.scheduler.block_manager.num_available == num_free


def test_text_around_an_image_is_that_of_transformers(gemma3):
    """Newlines merge with those of the text, so these stand in the text before it is tokenized."""
    path, _ = gemma3
    with engine(path) as llm:
        tokenizer = llm.get_tokenizer()
        text = "ab\n<start_of_image>\ncd <start_of_image><start_of_image>"
        full = f"\n\n<start_of_image>{'<image_soft_token>' * 16}<end_of_image>\n\n"
        expected = tokenizer(text.replace("<start_of_image>", full))["input_ids"]
        images = [PAGE, TALL, WIDE]
        output = llm.generate({"prompt": text, "multi_modal_data": {"image": images}}, GREEDY, use_tqdm=False)[0]
        assert output.prompt_token_ids == expected
        template = "{% for p in messages[0]['content'] %}{{ p['text'] or '<start_of_image>' }}{% endfor %}"
        content = [{"type": "text", "text": "ab\n"}, {"type": "image", "image": PAGE}, {"type": "text", "text": "\ncd"}]
        chat = llm.chat([{"role": "user", "content": content}], GREEDY, use_tqdm=False, chat_template=template)[0]
        text = "ab\n<start_of_image>\ncd".replace("<start_of_image>", full)
        expected = tokenizer(text)["input_ids"]
        assert chat.prompt_token_ids == expected
        # an expanded text may come back
        again = llm.generate({"prompt": text, "multi_modal_data": {"image": PAGE}}, GREEDY, use_tqdm=False)[0]
        assert again.prompt_token_ids == expected
        assert chat.outputs[0].token_ids == again.outputs[0].token_ids
        with refuses("0 image placeholders"):
            llm.generate({"prompt": "ab", "multi_modal_data": {"image": PAGE}}, GREEDY)


@pytest.mark.parametrize("family, options, reason", [
    ("gemma3", {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 8, "pan_and_scan_max_num_crops": 4,
                "pan_and_scan_min_ratio_to_activate": 1.2}, r"make 5 image\(s\) of 32 × 32 pixels; .* one of 32 × 32"),
    ("gemma3", {"size": {"height": 64, "width": 64}}, r"make 1 image\(s\) of 64 × 64 pixels; .* one of 32 × 32"),
    ("mistral3", {"size": {"longest_edge": 88}}, r"make 1 image\(s\) of 88 × 16 pixels; .* one of at most 72 × 72"),
    ("mistral3", {"patch_size": 4}, r"make 1 image\(s\) of 72 × 12 pixels; .* squares of 8"),
])  # fmt: skip
def test_images_that_the_tower_does_not_take(family, options, reason, request):
    """They are errors of their requests, in place of the engine's."""
    path, _ = request.getfixturevalue(family)
    with engine(path) as llm:
        prompt = {**given([IMAGE, 5], [image(90, 14, 4)]), "mm_processor_kwargs": options}
        output = llm.generate(prompt, GREEDY, use_tqdm=False)[0]
    assert re.search(reason, output.outputs[0].stop_reason)


@pytest.mark.parametrize(("family", "text"), [("gemma3", "<start_of_image>"), ("mistral3", "[IMG]")])
def test_parts_of_families_without_sizes(family, text, request):
    """A size beside an image is refused by name; a template that takes strings gets the family's placeholder."""
    path, _ = request.getfixturevalue(family)
    part = {"type": "image", "image": PAGE}
    template = {"chat_template": "{{ messages[0].content }}"}
    with engine(path) as llm:
        for name in ("min_pixels", "max_pixels", "resized_height", "resized_width"):
            with refuses(f"the image processor of this model has no option '{name}' for an image."):
                llm.chat([{"role": "user", "content": [{**part, name: 64}]}], GREEDY, use_tqdm=False, **template)
        messages = [{"role": "user", "content": [part, {"type": "text", "text": "ab"}]}]
        places = [{"role": "user", "content": [{"type": "image"}, "ab"]}]
        assert llm.apply_chat_template(places, **template) == text + "\nab"
        (output,) = llm.chat(messages, GREEDY, use_tqdm=False, **template)
        assert output["finish_reason"] == "length"


# ---------------------------------------------------------------- Mistral 3


def test_an_image_of_one_token(mistral3):
    """Alone it was the end of a step; and its expanded prompt got a second end of the image."""
    path, twin = mistral3
    tiny = image(8, 8, 5)
    with engine(path) as llm:
        output, again = (
            llm.generate(given(ids, [tiny]), GREEDY, use_tqdm=False)[0] for ids in ([5, IMAGE], [5, IMAGE, LAST_END])
        )
        assert output.prompt_token_ids == again.prompt_token_ids == [5, IMAGE, LAST_END]
        assert tokens_of([output]) == tokens_of([again])
        several = llm.generate(given([IMAGE, 6, IMAGE], [tiny, PAGE]), GREEDY, use_tqdm=False)
        assert tokens_of(several) == [twin.greedy([IMAGE, 6, IMAGE], [tiny, PAGE], N)]


def test_rows_of_an_image_end_with_tokens_of_the_tokenizer(mistral3):
    path, _ = mistral3
    with engine(path) as llm:
        output = llm.generate({"prompt": "ab[IMG]c", "multi_modal_data": {"image": PAGE}}, GREEDY, use_tqdm=False)[0]
        a, b, c = llm.tokenize(["abc"])[0]
    row = [IMAGE] * 3  # 24 pixels of width, 4 a patch, 2 patches a token
    assert output.prompt_token_ids == [a, b, *[*row, ROW_END] * 4, *row, LAST_END, c]
    with engine(path, skip_tokenizer_init=True) as llm:
        again = llm.generate(given(output.prompt_token_ids, [PAGE]), GREEDY, use_tqdm=False)[0]
        assert again.outputs[0].token_ids == output.outputs[0].token_ids
        failed = llm.generate(given([a, IMAGE, c], [PAGE]), GREEDY, use_tqdm=False)[0]
        assert "needs a tokenizer" in failed.outputs[0].stop_reason


@pytest.mark.parametrize("family", ["gemma3", "mistral3"])
def test_names_of_tensors(family, request, tmp_path):
    """As published, and as transformers has them in memory, older and newer."""
    path, twin = request.getfixturevalue(family)
    expected = twin.greedy(*PROMPTS[0], N)
    shutil.copytree(path, tmp_path, dirs_exist_ok=True)
    published = load_file(f"{path}/model.safetensors")
    plain = {name.replace("vision_tower.vision_model.", "vision_tower."): x for name, x in published.items()}
    inner = {f"model.{name}".replace("model.language_model.model.", "model.language_model."): x
             for name, x in plain.items()}  # fmt: skip
    inner = {re.sub(r"^model\..*lm_head\.", "lm_head.", name): x for name, x in inner.items()}
    outer = {name.replace("vision_tower.", "vision_tower.vision_model."): x for name, x in plain.items()}
    for tensors in (inner, plain, outer):
        save_file(tensors, tmp_path / "model.safetensors")
        with engine(tmp_path) as llm:
            assert tokens_of(llm.generate([given(*PROMPTS[0])], GREEDY, use_tqdm=False)) == [expected]


def as_lighton_publishes(config, tensors):
    config |= {"model_type": "mistral3", "architectures": ["LightOnOCRForConditionalGeneration"],
               "multimodal_projector_bias": False, "projector_hidden_act": "gelu", "vision_feature_layer": -1}
    config["text_config"]["tie_word_embeddings"] = config.pop("tie_word_embeddings")


def as_glm_publishes(config, tensors):
    """A layer more, of which nothing here draws drafts."""
    last = config["text_config"]["num_hidden_layers"]
    config["text_config"]["num_nextn_predict_layers"] = 1
    for name in [name for name in tensors if f"language_model.layers.{last - 1}." in name]:
        tensors[name.replace(f".{last - 1}.", f".{last}.")] = tensors[name].clone()
    for name in ("eh_proj", "enorm", "hnorm", "shared_head.norm"):
        tensors[f"model.language_model.layers.{last}.{name}.weight"] = torch.zeros(4)


def as_paddle_publishes(config, tensors):
    """Fields of the decoder at the top, two parts of the tower that nothing uses, other names."""
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    config |= {name: value for name, value in text.items() if name not in ("model_type", "architectures")}
    config |= {"rope_theta": rope["rope_theta"],
               "rope_scaling": {"mrope_section": rope["mrope_section"], "rope_type": "default", "type": "default"}}
    for name in list(tensors):
        new = name.replace("model.projector.", "mlp_AR.").replace("model.visual.", "visual.")
        tensors[new.replace("language_model.", "")] = tensors.pop(name)
    for name in ("head.probe", "head.attention.in_proj_weight", "embeddings.packing_position_embedding.weight"):
        tensors[f"visual.vision_model.{name}"] = torch.zeros(3, 8)


@pytest.mark.parametrize("family, change", [
    ("lighton_ocr", as_lighton_publishes), ("glm_ocr", as_glm_publishes), ("paddleocr_vl", as_paddle_publishes),
], ids=["lighton_ocr", "glm_ocr", "paddleocr_vl"])  # fmt: skip
def test_published_files(family, change, shared, tmp_path):
    """They differ from what transformers writes."""
    path, _, expected = shared(family)
    shutil.copytree(path, tmp_path, dirs_exist_ok=True)
    config, tensors = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    change(config, tensors)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    with engine(tmp_path) as llm:
        assert answers(llm) == expected


def test_images_that_attend_both_ways_differ_from_causal_ones(gemma3, monkeypatch):
    """Else the tests here would show nothing."""
    from nanovllm.runner import images

    path, twin = gemma3
    monkeypatch.setattr(images, "blocks_of", lambda *args: [])
    ids, chosen = PROMPTS[0]
    with engine(path, max_num_seqs=1) as llm:
        prompt = llm._inputs.attachments.encode(given(ids, chosen))[1].attachment().prompt_ids.tolist()
        _, (logits,) = generate_with_logits_of(llm, prompt, chosen)
    expected = twin.logits(ids, chosen)[-1]
    assert (logits[0] - expected).abs().max() > 1e-3 * expected.abs().max()
    assert torch.isfinite(logits).all()
