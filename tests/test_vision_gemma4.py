"""Images of Gemma 4: attention both ways in layers with a window, per-layer inputs, sizes, texts and published files.

``test_vision_families.py`` compares its tokens with transformers' in the ways of all families.
"""

import json
import random
import shutil
from functools import cache

import numpy as np
import pytest
import torch
import vision_families
from helpers import needs, refuses, tokens_of
from safetensors.torch import load_file, save_file
from test_vision_families import GREEDY, PAGE, PROMPTS, TALL, WIDE, N, chunks_of, engine, generate_with_logits_of, given
from vision_families import END, IMAGE, START, Twin, image

from nanovllm import SamplingParams
from nanovllm.engine.images.processing import ImageProcessor
from nanovllm.models.vision import VisionConfig

pytestmark = needs("engine.images")
FAMILIES = ("gemma4_moe", "gemma4_e")
SIZES = {15, 10, 8}  # tokens of PAGE, WIDE and TALL


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """shared(family) -> directory and twin; no test may change them."""

    @cache
    def make(family):
        path = tmp_path_factory.mktemp(family)
        return str(path), Twin(vision_families.make_checkpoint(family, path), path)

    return make


@pytest.fixture(scope="module")
def moe(shared):
    return shared("gemma4_moe")


@pytest.mark.parametrize("family", FAMILIES)
def test_preempted_and_several_completions(family, shared):
    path, twin = shared(family)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    prompts = [given(*PROMPTS[i]) for i in (0, 2, 3, 4)]
    options = {"enable_prefix_caching": False, "max_model_len": 128}
    with engine(path, num_kvcache_blocks=9, **options) as llm:
        crowded = tokens_of(llm.generate(prompts, params, use_tqdm=False))
        assert llm.scheduler.num_preemptions > 0
    with engine(path, **options) as llm:
        assert tokens_of(llm.generate(prompts, params, use_tqdm=False)) == crowded
        several = llm.generate(prompts[0], SamplingParams(seed=5, max_tokens=N, n=3), use_tqdm=False)[0]
        alone = [llm.generate(prompts[0], SamplingParams(seed=5 + i, max_tokens=N), use_tqdm=False) for i in range(3)]
    assert [each.token_ids for each in several.outputs] == [tokens_of(each)[0] for each in alone]
    assert [tokens[:N] for tokens in crowded[:2]] == [twin.greedy(*PROMPTS[i], N) for i in (0, 2)]


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_of_the_prompt(family, shared):
    """All layers compute all tokens."""
    path, twin = shared(family)
    with engine(path, max_num_batched_tokens=21, max_num_seqs=2) as llm:
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        (output,) = llm.generate([given(*PROMPTS[0])], params, use_tqdm=False)
    expected = twin.logits(*PROMPTS[0]).log_softmax(-1)
    for place, (token, found) in enumerate(zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)):
        if place:
            assert found[token].logprob == pytest.approx(expected[place - 1, token].item(), abs=1e-4)


@pytest.mark.parametrize("budget", [15, 22])
def test_no_chunk_ends_within_an_image(moe, budget):
    path, twin = moe
    rng = random.Random(budget)
    cases = []
    for _ in range(6):
        chosen = rng.choices([PAGE, WIDE, TALL], k=rng.randrange(4))
        text = [[rng.randrange(3, 180) for _ in range(rng.randrange(1, 30))] for _ in range(len(chosen) + 1)]
        cases.append((sum(([START, IMAGE, END, *part] for part in text[1:]), text[0]), chosen))
    options = {"max_num_batched_tokens": budget, "max_num_seqs": 3, "enable_prefix_caching": bool(budget % 2)}
    with engine(path, **options) as llm:
        chunks, found = chunks_of(llm, [given(*case) for case in cases])
    assert found == [twin.greedy(*case, N) for case in cases]
    lengths = set()
    for chunk in chunks:
        ends = np.flatnonzero(np.diff(np.r_[False, chunk < 0, False]))
        lengths |= set((ends[1::2] - ends[::2]).tolist())
    assert lengths and (options["enable_prefix_caching"] or lengths <= SIZES)


def test_a_hit_may_end_within_an_image(moe):
    path, twin = moe
    first = [*range(3, 12), START, IMAGE, END, 7, 8], [PAGE]
    second = [*range(3, 12), START, IMAGE, END, 9, 8, 3, 5], [PAGE]
    with engine(path, max_num_batched_tokens=18, max_num_seqs=2) as llm:
        for case, num_cached in ((first, [0]), (second, [16])):
            output = llm.generate(given(*case), GREEDY, use_tqdm=False)[0]
            assert output.num_cached_tokens in num_cached
            assert tokens_of([output]) == [twin.greedy(*case, N)]


def test_an_image_longer_than_a_launch(moe, shared):
    """It ends its request alone. E2B and E4B take it in chunks."""
    path, twin = moe
    prompts = [given([IMAGE, 5], [PAGE]), given([IMAGE, 5], [WIDE])]
    with engine(path, max_num_batched_tokens=12, max_num_seqs=4) as llm:
        failed, found = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert "the image has 15 tokens, which attend each other both ways, and a launch takes 12; raise max_num" in (
            failed.outputs[0].stop_reason
        )
        assert tokens_of([found]) == [twin.greedy([IMAGE, 5], [WIDE], N)]
    path, twin = shared("gemma4_e")
    with engine(path, max_num_batched_tokens=12, max_num_seqs=4) as llm:
        found = tokens_of(llm.generate(prompts, GREEDY, use_tqdm=False))
    assert found == [twin.greedy([IMAGE, 5], [each], N) for each in (PAGE, WIDE)]


@pytest.mark.parametrize("change", ["causal", "in all layers"])
def test_images_attend_both_ways_in_layers_with_a_window_alone(moe, change, monkeypatch):
    """Else the tests here would show nothing."""
    from nanovllm.models import vision

    path, twin = moe
    ids, chosen = PROMPTS[0]
    monkeypatch.setitem(vision.KINDS, "vision", vision.KINDS["" if change == "causal" else "all"])
    with engine(path, max_num_seqs=1) as llm:
        prompt = twin.inputs(ids, chosen)["input_ids"][0].tolist()
        _, (logits,) = generate_with_logits_of(llm, prompt, chosen)
    expected = twin.logits(ids, chosen)[-1]
    assert (logits[0] - expected).abs().max() > 1e-3 * expected.abs().max()


def test_image_tokens_take_the_per_layer_inputs_of_padding(shared):
    """Another embedding of the image's token changes nothing; of the padding token it does."""
    path, twin = shared("gemma4_e")
    table = twin.model.model.language_model.embed_tokens_per_layer.weight
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)

    def last(llm):
        (output,) = llm.generate(given([IMAGE, 5, 7], [PAGE]), params, use_tqdm=False)
        return output.prompt_logprobs[-1][7].logprob

    with engine(path) as llm:
        expected = last(llm)
        for token, is_same in ((IMAGE, True), (3, False)):
            changed = table.detach().clone()
            changed[token] += 1
            llm.update_weights({"model.language_model.embed_tokens_per_layer.weight": changed}, partial=True)
            assert (abs(last(llm) - expected) < 1e-5) == is_same


# ---------------------------------------------------------------- texts and messages


TEMPLATE = "{% for p in messages[0]['content'] %}{{ p['text'] or '<|image|>' }}{% endfor %}"


def test_text_around_an_image_is_that_of_transformers(moe):
    """A placeholder is an image with a token before and after it, also next to another."""
    path, _ = moe
    with engine(path) as llm:
        tokenizer = llm.get_tokenizer()

        def full(*numbers):
            return "".join(f"<|image>{'<|image|>' * number}<image|>" for number in numbers)

        text = "ab<|image|> cd <|image|><|image|>"
        expected = tokenizer(f"ab{full(15)} cd {full(8, 10)}")["input_ids"]
        data = {"multi_modal_data": {"image": [PAGE, TALL, WIDE]}}
        output = llm.generate({"prompt": text, **data}, GREEDY, use_tqdm=False)[0]
        assert output.prompt_token_ids == expected
        again = llm.generate({"prompt": f"ab{full(15)} cd {full(8, 10)}", **data}, GREEDY, use_tqdm=False)[0]
        assert again.prompt_token_ids == expected and tokens_of([again]) == tokens_of([output])
        parts = [{"type": "text", "text": "ab"}, {"type": "image", "image": PAGE}, {"type": "image", "image": TALL}]
        (chat,) = llm.chat([{"role": "user", "content": parts}], GREEDY, use_tqdm=False, chat_template=TEMPLATE)
        assert chat.prompt_token_ids == tokenizer(f"ab{full(15, 8)}")["input_ids"]


def test_audio_and_video_are_refused(moe):
    path, _ = moe
    with engine(path) as llm:
        for kind in ("audio", "video", "input_audio", "audio_url", "video_url"):
            part = {"type": kind, kind: "x.wav"}
            with refuses(f"'image_pil' or 'image', not '{kind}'."):
                llm.chat([{"role": "user", "content": [part]}], GREEDY, use_tqdm=False, chat_template=TEMPLATE)
        for kind in ("audio", "video"):
            with refuses(f"multi_modal_data cannot have '{kind}': images only."):
                llm.generate({"prompt_token_ids": [3], "multi_modal_data": {kind: b"x"}}, GREEDY, use_tqdm=False)


# ---------------------------------------------------------------- sizes and files


def test_budgets_of_tokens(moe):
    """Of an engine, and of a request."""
    path, twin = moe
    smaller = {"max_soft_tokens": 9}
    twin.processor.max_soft_tokens = 9
    expected = twin.greedy([IMAGE, 5], [PAGE], N)
    twin.processor.max_soft_tokens = 16
    with engine(path) as llm:
        prompts = [given([IMAGE, 5], [PAGE]), {**given([IMAGE, 5], [PAGE]), "mm_processor_kwargs": smaller}]
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert [output.prompt_token_ids.count(IMAGE) for output in outputs] == [15, 6]
        assert tokens_of(outputs) == [twin.greedy([IMAGE, 5], [PAGE], N), expected]
        for options, reason in (({"max_soft_tokens": 10}, "`max_soft_tokens` must be one of (9, 16), got 10"),
                                ({"patch_size": 8}, "the image processor has patch_size=8, and the vision tower of")):
            with refuses(reason):
                llm.generate({**prompts[0], "mm_processor_kwargs": options}, GREEDY, use_tqdm=False)
        failed = llm.generate({**given([IMAGE, 5], [image(32, 36, 2)]), "mm_processor_kwargs": {"do_resize": False}},
                              GREEDY, use_tqdm=False)[0]  # fmt: skip
        assert "it has 8 x 9 patches, which make no squares of 3 x 3" in failed.outputs[0].stop_reason
    with engine(path, mm_processor_kwargs=smaller) as llm:
        assert tokens_of(llm.generate(prompts[0], GREEDY, use_tqdm=False)) == [expected]


def test_an_image_of_more_patches_than_the_tower_has_places_for(moe, tmp_path):
    path, _ = moe
    raw = edited(path, tmp_path, lambda config, tensors: config["vision_config"].update(position_embedding_size=20))
    vision = VisionConfig.read(raw)
    with refuses("the image has 24 x 3 patches; the tower takes 20 on a side"):
        vision.grid(ImageProcessor(raw, {}, vision)(TALL))


@pytest.mark.parametrize("family", ["gemma4_moe", "gemma4_unified"])
def test_published_files(family, shared, tmp_path):
    """All settings of processors in one file; a checkpoint of audio, too; defaults left out, and older fields."""
    path, twin = shared(family)

    def publish(config, tensors):
        config["audio_config"] = {"model_type": family.replace("_moe", "") + "_audio"}
        config |= {"vision_soft_tokens_per_image": 280, "eoa_token_index": 198}
        config["vision_config"] |= {"default_output_length": 280, "global_head_dim": 20, "attention_bias": False,
                                    "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"}}  # fmt: skip
        for name in ("audio_tower.layers.0.x", "embed_audio.embedding_projection.weight"):
            tensors[f"model.{name}"] = torch.zeros(3, 8)
        if family == "gemma4_unified":
            assert "model.vision_embedder.patch_dense.weight" in tensors
            del config["text_config"]["use_bidirectional_attention"]  # "vision" is this class's default

    path = edited(path, tmp_path, publish)
    file = tmp_path / "preprocessor_config.json"
    processor = json.loads(file.read_text())
    file.unlink()
    processor["image_processor_type"] = "Gemma4UnifiedImageProcessor" if "unified" in family else "Gemma4ImageProcessor"
    published = {"image_processor": processor, "image_seq_length": 280, "audio_seq_length": 750,
                 "processor_class": "Gemma4Processor"}  # fmt: skip
    (tmp_path / "processor_config.json").write_text(json.dumps(published))
    with engine(path) as llm:
        found = tokens_of(llm.generate([given(*PROMPTS[0])], GREEDY, use_tqdm=False))
    assert found == [twin.greedy(*PROMPTS[0], N)]


def edited(path, to, change):
    """The path of a copy of a checkpoint whose config.json and tensors are changed."""
    shutil.copytree(path, to, dirs_exist_ok=True)
    config, tensors = json.loads((to / "config.json").read_text()), load_file(to / "model.safetensors")
    change(config, tensors)
    (to / "config.json").write_text(json.dumps(config))
    save_file(tensors, to / "model.safetensors")
    return str(to)
