"""Images through the engine: chunks, the prefix cache, preemption, drafts, ranks; the oracle is transformers."""

import gc
import re
import threading
from time import sleep

import numpy as np
import pytest
import torch
import vision_families
from vision_families import END, IMAGE, START, Twin, image

from nanovllm import LLM, RequestError, SamplingParams
from nanovllm.distributed.group import SINGLE_RANK
from nanovllm.engine.images import loading, processing
from nanovllm.engine.images.attachment import content_ids
from nanovllm.models.config_reader import read_model_config
from nanovllm.models.decoder import CausalLM
from nanovllm.models.loader import load_model
from nanovllm.models.vision import VisionConfig
from nanovllm.models.vision_tower import VisionTower
from nanovllm.runner.images import VisionPart

PAGE, WIDE, TALL = image(40, 24, 1), image(33, 70, 2), image(90, 18, 3)
PROMPTS = [  # token ids with a placeholder for each image, and the images
    ([5, 6, START, IMAGE, END, 9, START, IMAGE, END, 7, 8, 3], [PAGE, WIDE]),
    ([4, 3, 2], []),
    ([IMAGE, 9, 8], [WIDE]),
    ([9, 8, 7, START, IMAGE], [PAGE]),
    ([IMAGE, 1, 7, 1, 7] * 3, [PAGE, TALL, PAGE]),
]
GIVEN = [{"prompt_token_ids": ids, "multi_modal_data": {"image": images}} for ids, images in PROMPTS]
N = 6
GREEDY = SamplingParams(temperature=0, max_tokens=N, ignore_eos=True)
FAMILIES = ["qwen3_vl", "qwen3_5"]  # with deepstack; with recurrent layers


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request, tmp_path_factory):
    """Directory, and the tokens that transformers continues PROMPTS with."""
    path = tmp_path_factory.mktemp(request.param)
    twin = Twin(vision_families.make_checkpoint(request.param, path), path)
    return str(path), [twin.greedy(ids, images, N) for ids, images in PROMPTS], twin


TOLERANCE = 2e-4 if torch.cuda.is_available() else 2e-5  # of log-probabilities in fp32
BLOCK = 64 if torch.cuda.is_available() else 16  # kernels of recurrent layers take no smaller ones


def engine(path, **options):
    options = {"kvcache_block_size": BLOCK, "dtype": "float32", "quiet": True} | options
    return LLM(str(path), skip_tokenizer_init=True, **options)


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("options", [
    {"max_num_batched_tokens": 16, "max_num_seqs": 4},  # every image is cut
    {"max_num_batched_tokens": 23, "max_num_seqs": 2, "enable_prefix_caching": False, "enforce_eager": True},
    {"speculative_config": {"method": "suffix", "adaptive": False}},
    {"tensor_parallel_size": 2, "max_num_batched_tokens": 50, "max_num_seqs": 8},
], ids=["chunks", "eager", "drafts", "ranks"])  # fmt: skip
def test_tokens_are_those_of_transformers(checkpoint, options):
    """Twice: the second time beginnings come from the prefix cache, if there is one."""
    if options.get("tensor_parallel_size", 1) > 1 and torch.cuda.is_available() and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    path, expected, _ = checkpoint
    with engine(path, **options) as llm:
        for _ in range(2):
            outputs = llm.generate(GIVEN, GREEDY, use_tqdm=False)
            assert tokens(outputs) == expected
        for output, (ids, images) in zip(outputs, PROMPTS, strict=True):
            assert output.prompt_token_ids.count(IMAGE) >= len(images)
            assert [token for token in output.prompt_token_ids if token != IMAGE] == [t for t in ids if t != IMAGE]


def test_logprobs_of_the_prompt(checkpoint):
    path, _, twin = checkpoint
    ids, images = PROMPTS[0]
    with engine(path) as llm:
        (output,) = llm.generate(GIVEN[0], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    expected = twin.logits(ids, images).log_softmax(-1)
    for place, (token, found) in enumerate(zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)):
        if place:
            tolerance = 2e-4 if torch.cuda.is_available() else 2e-5
            assert found[token].logprob == pytest.approx(expected[place - 1, token].item(), abs=tolerance)


def test_the_same_image_is_found_and_no_other(checkpoint):
    """In a prompt of text alone the placeholder is an ordinary token, which no image stands for."""
    path, _, twin = checkpoint
    near = np.array(TALL)
    near[-1, -1, 0] ^= 1
    ids, length = [START, IMAGE, END, *range(3, 90)], 16
    with engine(path) as llm:
        first = llm.generate({"prompt_token_ids": ids, "multi_modal_data": {"image": TALL}}, GREEDY, use_tqdm=False)[0]
        again = llm.generate({"prompt_token_ids": ids, "multi_modal_data": {"image": TALL}}, GREEDY, use_tqdm=False)[0]
        other = llm.generate({"prompt_token_ids": ids, "multi_modal_data": {"image": near}}, GREEDY, use_tqdm=False)[0]
        text = llm.generate(first.prompt_token_ids, GREEDY, use_tqdm=False)[0]
    assert first.num_cached_tokens == 0 and again.num_cached_tokens >= length
    assert other.num_cached_tokens < length and text.num_cached_tokens < length
    assert tokens([first, again]) == [twin.greedy(ids, [TALL], N)] * 2


def test_content_ids():
    a, b = content_ids(b"a" * 16, 500), content_ids(b"b" * 16, 500)
    assert (a < 0).all() and (b < 0).all() and not (a == b).any()
    assert np.array_equal(a[:7], content_ids(b"a" * 16, 7))


def test_preempted(checkpoint, monkeypatch):
    """The images of a preempted request load again while it waits; no launch waits for an image."""
    path, _, _ = checkpoint
    threads = []
    original = loading.ImageLoader.process
    monkeypatch.setattr(
        loading.ImageLoader, "process", lambda *args: threads.append(threading.current_thread()) or original(*args)
    )
    params = SamplingParams(temperature=0, max_tokens=60)
    given = [GIVEN[i] for i in (0, 2, 3, 4)]
    options = {"enable_prefix_caching": False, "max_model_len": 200}
    with engine(path, num_kvcache_blocks=13 if BLOCK == 16 else 5, **options) as llm:
        crowded = tokens(llm.generate(given, params, use_tqdm=False))
        assert llm.scheduler.num_preemptions > 0
        assert len(threads) > sum(len(PROMPTS[i][1]) for i in (0, 2, 3, 4))
        assert threading.main_thread() not in threads
    with engine(path, enable_prefix_caching=False) as llm:
        assert tokens(llm.generate(given, params, use_tqdm=False)) == crowded


@pytest.mark.parametrize("caching", [False, True])
def test_completions_of_a_prompt_are_preempted_together(checkpoint, caching):
    """They share the pixels, and the first one of a batch dropped them: the engine stopped."""
    path, _, _ = checkpoint
    params = SamplingParams(seed=1, max_tokens=60, n=3, ignore_eos=True)
    options = {"enable_prefix_caching": caching, "max_model_len": 128}
    prompts = [GIVEN[3], GIVEN[2]]
    with engine(path, **options) as llm:
        expected = [[each.token_ids for each in output.outputs] for output in llm.generate(prompts, params, False)]
    for budget in (16, 128):  # images are cut, or several completions are in a batch
        with engine(path, num_kvcache_blocks=128 // BLOCK, max_num_batched_tokens=budget, **options) as llm:
            crowded = [[each.token_ids for each in output.outputs] for output in llm.generate(prompts, params, False)]
            assert llm.scheduler.num_preemptions > 0
        assert crowded == expected


def test_an_image_that_cannot_be_loaded_again(checkpoint, monkeypatch):
    """Its request ends, and the others go on. The engine raised the error in each step."""
    path, _, _ = checkpoint
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    options = {"enable_prefix_caching": False, "max_model_len": 128}
    image, processed, original = PAGE.copy(), [], loading.ImageLoader.process

    def process(self, *args):
        processed.append(original(self, *args))
        if len(processed) == 2:  # both are loaded
            image.close()
        return processed[-1]

    monkeypatch.setattr(loading.ImageLoader, "process", process)
    given = [GIVEN[3], {**GIVEN[3], "multi_modal_data": {"image": [image]}}]
    with engine(path, num_kvcache_blocks=128 // BLOCK, **options) as llm:
        for _ in range(2):
            good, bad = llm.generate(given, params, use_tqdm=False)
            assert llm.scheduler.num_preemptions > 0 and bad.outputs[0].finish_reason == "error"
            assert "A PIL image must stay open until its request is finished." in bad.outputs[0].stop_reason
            assert good.outputs[0].finish_reason == "length" and len(good.outputs[0].token_ids) == 60
        assert llm.is_finished() and not llm.scheduler.waiting


def test_pixels_are_bounded(checkpoint, monkeypatch):
    """Beyond the bound they are dropped, and made again when their turn comes; at the end none is left."""
    path, expected, _ = checkpoint
    most = [0]
    original = loading.ImageLoader.count

    def count(self, num_bytes):
        original(self, num_bytes)
        most[0] = max(most[0], self.num_bytes)

    monkeypatch.setattr(loading.ImageLoader, "count", count)
    with engine(path, max_pixel_gib=1e-9) as llm:
        ids = [llm.add_request(prompt, GREEDY) for prompt in GIVEN]
        found = {}
        while not llm.is_finished():
            found |= dict(llm.step()[0])
        assert [found[request_id] for request_id in ids] == expected
        gc.collect()
        assert llm._inputs.attachments.num_bytes == 0
    pages = max(len(images) for _, images in PROMPTS)
    assert 0 < most[0] <= (pages + 1) * largest_image(path), "one prompt's images, and the first one's"


@pytest.mark.parametrize("steps", [{"do_resize": False}, {"no_such_option": 1}], ids=["other", "unknown"])
def test_a_processor_of_another_kind_makes_the_numbers(checkpoint, monkeypatch, steps):
    """Where its steps after resizing are no table of levels, or cannot be left out."""
    path, expected, _ = checkpoint
    monkeypatch.setattr(processing, "AS_LEVELS", steps)
    with engine(path) as llm:
        image = llm._inputs.attachments.load(PROMPTS[0][1][0], {})
        assert image.pixels.tensors["pixel_values"].is_floating_point() and "table" not in image.pixels.tensors
        assert tokens(llm.generate(GIVEN, GREEDY, use_tqdm=False)) == expected


def test_half_of_the_cores_process_images(checkpoint, monkeypatch):
    """The others launch, and threads that wait for files and hosts do not count."""
    path, expected, _ = checkpoint
    running, most = [], []
    original = loading.ImageLoader.process

    def process(self, *args):
        running.append(1)
        most.append(len(running))
        sleep(0.02)
        found = original(self, *args)
        running.pop()
        return found

    monkeypatch.setattr(loading.ImageLoader, "process", process)
    monkeypatch.setattr(loading, "CORES", threading.BoundedSemaphore(2))
    monkeypatch.setattr(loading, "NUM_THREADS", 5)
    with engine(path) as llm:
        assert tokens(llm.generate(GIVEN, GREEDY, use_tqdm=False)) == expected
    assert max(most) == 2


def largest_image(path):
    """Bytes of the pixels of the largest image."""
    with engine(path) as llm:
        loader = llm._inputs.attachments
        images = [loader.load(image, {}) for _, images in PROMPTS for image in images]
        return max(sum(tensor.nbytes for tensor in image.pixels.tensors.values()) for image in images)


def test_several_completions_and_penalties(checkpoint):
    path, _, twin = checkpoint
    with engine(path) as llm:
        several = llm.generate(GIVEN[0], SamplingParams(seed=5, max_tokens=N, n=3), use_tqdm=False)[0]
        alone = [llm.generate(GIVEN[0], SamplingParams(seed=5 + i, max_tokens=N), use_tqdm=False)[0] for i in range(3)]
        assert [each.token_ids for each in several.outputs] == tokens(alone)
        params = SamplingParams(temperature=0, max_tokens=N, repetition_penalty=1.7, ignore_eos=True)
        (found,) = tokens(llm.generate(GIVEN[0], params, use_tqdm=False))
    ids, images = PROMPTS[0]
    expected = []
    for _ in range(N):
        logits = twin.logits([*ids, *expected], images)[-1].clone()
        seen = [token for token in {*ids, *expected} if token != IMAGE]  # which is never sampled
        logits[seen] = torch.where(logits[seen] > 0, logits[seen] / 1.7, logits[seen] * 1.7)
        expected.append(int(logits.argmax()))
    assert found == expected


def test_after_sleep_and_new_weights(checkpoint):
    """The tower keeps its weights."""
    path, expected, _ = checkpoint
    with engine(path) as llm:
        llm.sleep()
        llm.wake_up()
        assert tokens(llm.generate(GIVEN, GREEDY, use_tqdm=False)) == expected
        llm.reset_prefix_cache()
        assert tokens(llm.generate(GIVEN, GREEDY, use_tqdm=False)) == expected


def test_after_an_interrupted_step(checkpoint, monkeypatch):
    """The engine could not be used any more."""
    path, expected, _ = checkpoint
    with engine(path) as llm:
        assert tokens(llm.generate(GIVEN, GREEDY, use_tqdm=False)) == expected
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(VisionPart, "_features_of", interrupt)
            llm.generate({"prompt_token_ids": [9, IMAGE], "multi_modal_data": {"image": TALL}}, GREEDY, use_tqdm=False)
        for given in ([{"prompt_token_ids": ids} for ids, images in PROMPTS if not images], GIVEN):
            found = tokens(llm.generate(given, GREEDY, use_tqdm=False))
            assert found == (expected if given is GIVEN else expected[1:2])


def interrupt(*_):
    raise KeyboardInterrupt


def test_a_processor_of_logits_sees_placeholders(checkpoint):
    path, _, _ = checkpoint
    seen = []

    def process(prompt_ids, token_ids, logits):
        seen.append(list(prompt_ids))
        return logits

    with engine(path) as llm:
        params = SamplingParams(temperature=0, max_tokens=2, logits_processors=[process])
        (output,) = llm.generate(GIVEN[3], params, use_tqdm=False)
    assert seen[0] == output.prompt_token_ids and IMAGE in seen[0]


def test_an_expanded_prompt_may_come_back(checkpoint):
    """As a chat's next turn by token ids."""
    path, expected, _ = checkpoint
    with engine(path) as llm:
        (output,) = llm.generate(GIVEN[0], GREEDY, use_tqdm=False)
        again = {"prompt_token_ids": output.prompt_token_ids, "multi_modal_data": {"image": PROMPTS[0][1]}}
        assert tokens(llm.generate(again, GREEDY, use_tqdm=False)) == expected[:1]
        (cut,) = llm.generate({**again, "prompt_token_ids": output.prompt_token_ids[:-20]}, GREEDY, use_tqdm=False)
        assert cut.outputs[0].finish_reason == "error"
        assert re.search(r"\d+ image placeholders .* and 2 images", cut.outputs[0].stop_reason)
        with pytest.raises(RequestError, match=r"1 image placeholders .* and 2 images"):
            llm.generate({**again, "prompt_token_ids": [IMAGE, 5]}, GREEDY, use_tqdm=False)


@pytest.mark.parametrize(("counts", "why"), [
    ((15, 24), None), ((14, 25), r"14 image placeholders \(token 190\) in a row at token 2, which do not fit image 0"),
    ((24, 15), "9 .* at token 17, which do not fit image 1 of"), ((15, 25), "25 .* at token 19, .* image 1 "),
    ((16, 24), "1 .* at token 17, .* image 1 of"), ((40, 40), "25 .* at token 17, .* image 1 of"),
])  # fmt: skip
def test_an_expanded_prompt_has_the_tokens_of_each_image(checkpoint, counts, why):
    """Features were put at wrong places, where a prompt was made with other options of the image processor."""
    path, _, _ = checkpoint
    first, second = counts
    ids = [5, START, *[IMAGE] * first, END, START, *[IMAGE] * second, END, 7]
    with engine(path) as llm:
        given = {"prompt_token_ids": ids, "multi_modal_data": {"image": [PAGE, WIDE]}}
        (output,) = llm.generate(given, GREEDY, use_tqdm=False)
    if why is None:
        assert output.outputs[0].finish_reason == "length" and output.prompt_token_ids == ids
    else:
        assert output.outputs[0].finish_reason == "error" and re.search(why, output.outputs[0].stop_reason)


def test_a_sampled_placeholder_is_text(checkpoint):
    """It has the embedding of its id, and shares no block with an image."""
    path, _, twin = checkpoint
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, allowed_token_ids=[IMAGE])
    with engine(path) as llm:
        (output,) = llm.generate(GIVEN[3], params, use_tqdm=False)
        assert output.outputs[0].token_ids == [IMAGE] * 40
        text = [4, 3, *[IMAGE] * 20]
        assert tokens(llm.generate(text, GREEDY, use_tqdm=False)) == [twin.greedy_text(text, N)]


@pytest.mark.parametrize("family, name", [("glm_ocr", "up_proj"), ("qwen2_5_vl", "down_proj")])
def test_padded_mlps(family, name, tmp_path):
    """A GPU's products have more units than the checkpoint, and the same results; also those of new weights."""
    vision_families.make_checkpoint(family, tmp_path)
    path = str(tmp_path)
    tower, other = (VisionTower(VisionConfig.read(path), path, torch.float32) for _ in range(2))
    decoder = CausalLM(read_model_config(path), None, SINGLE_RANK)
    load_model(decoder, path, extra=[tower])
    pixels = [{"pixel_values": torch.randn(48, 96), "image_grid_thw": torch.tensor([[1, 8, 6]])}]
    expected = tower(pixels)
    tower.pad_mlps()
    assert 64 in getattr(tower.model.visual.blocks[0].mlp, name).weight.shape  # of 56
    torch.testing.assert_close(tower(pixels), expected)
    other.pad_mlps()
    for param in other.parameters():
        param.fill_(torch.nan)  # as memory may be after ``sleep(2)``
    load_model(decoder, path, extra=[other])
    torch.testing.assert_close(other(pixels), expected)
