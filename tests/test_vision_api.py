"""Images as users give them, permissions, and errors by name; numbers are those of tests/test_vision.py."""

import base64
import gc
import io
import json
import os
import shutil
import struct
import weakref
import zlib
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import vision_families
from helpers import greedy, refuses, run, tokens_of
from PIL import Image as PILImage
from vision_families import IMAGE, image

from nanovllm import LLM, CheckpointError, ConfigError, RequestError, SamplingParams, StructuredOutputsParams
from nanovllm.contrib.beam_search import BeamSearchParams
from nanovllm.engine.images import loading, sources
from nanovllm.engine.images.sources import open_image
from nanovllm.integrations.engine_thread import EngineThread
from nanovllm.models import vision

PAGE, OTHER = image(40, 24, 1), image(33, 70, 2)
ONE = "<|vision_start|><|image_pad|><|vision_end|>Read it."
THREE = greedy(3)


def encoded(picture, kind="PNG", **options):
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


PNG = encoded(PAGE)
DATA_URL = "data:image/png;base64," + base64.b64encode(PNG).decode()


def asks(*images, text=ONE, **others):
    return {"prompt": text, "multi_modal_data": {"image": list(images)}, **others}


def why_of(output):
    return output.outputs[0].stop_reason


def says(*parts):
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "Read it."}]}]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    vision_families.make_checkpoint("qwen3_vl", path)
    vision_families.add_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A directory of images, and a link that leads out of it."""
    path = tmp_path_factory.mktemp("media") / "pages"
    path.mkdir()
    for place in (path, path.parent):
        (place / "page 1.png").write_bytes(PNG)
    (path / "out.png").symlink_to(path.parent / "page 1.png")
    (path / "in.png").symlink_to(path / "page 1.png")
    return path


@pytest.fixture(scope="module")
def site():
    """A server; its hosts are "127.0.0.1", which is allowed, and "localhost", which is not."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            port, to = self.server.server_address[1], self.path.partition("?")[2]
            self.send_response(302 if to else 404 if "missing" in self.path else 200)
            if to:
                self.send_header("Location", to.replace("PORT", str(port)))
            self.end_headers()
            self.wfile.write(b"" if to else PNG)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def engine(path, **options):
    defaults = {"device": "cpu", "kvcache_block_size": 16, "num_kvcache_blocks": 200, "max_model_len": 600}
    return LLM(str(path), **{**defaults, **options}, quiet=True)


@pytest.fixture(scope="module")
def llm(path, pages):
    with engine(path, allowed_local_media_path=str(pages), allowed_media_domains=["127.0.0.1"],
                limit_mm_per_prompt={"image": 3}) as llm:  # fmt: skip
        yield llm


@pytest.fixture(scope="module")
def answer(llm):
    """Tokens of ONE and PAGE."""
    return tokens_of(run(llm, asks(PAGE), THREE))[0]


# ---------------------------------------------------------------- forms


@pytest.mark.parametrize("form", [
    PAGE, np.array(PAGE), PNG, bytearray(PNG), DATA_URL, "page 1.png", "in.png", Path("page 1.png"), "./page 1.png",
    {"bytes": PNG, "path": "elsewhere.png"}, {"bytes": None, "path": "page 1.png"}, "FILE", "FILE URL", "SITE/page.png",
    "SITE/to?/page.png", "SITE/to?http://127.0.0.1:PORT/to?/page.png",
], ids=lambda form: f"{form!r:.30}")  # fmt: skip
def test_forms_of_an_image(llm, answer, pages, site, form):
    if isinstance(form, str):
        file = pages / "page 1.png"
        form = {"FILE": str(file), "FILE URL": file.as_uri()}.get(form, form.replace("SITE", site))
    (output,) = run(llm, {"prompt": ONE, "multi_modal_data": {"image": form}}, THREE)
    assert (output["token_ids"], why_of(output)) == (answer, None)


@pytest.mark.parametrize("part", [
    {"type": "image_url", "image_url": {"url": DATA_URL, "detail": "high"}}, {"type": "image_pil", "image_pil": PAGE},
    {"type": "image_url", "image_url": DATA_URL}, {"type": "input_image", "image_url": DATA_URL},
    {"type": "image", "image": PAGE}, {"type": "image", "image": np.array(PAGE)}, {"type": "image", "image": PNG},
    {"type": "image", "url": DATA_URL}, {"type": "image", "path": "page 1.png"},
    {"type": "image", "base64": base64.b64encode(PNG).decode()},
    {"image_url": DATA_URL}, {"image_url": {"url": DATA_URL, "detail": None}}, {"image": PAGE}, {"image_pil": PAGE},
    {"type": "image", "image_url": {"url": DATA_URL}}, {"type": None, "image": PNG, "text": "", "video": None},
    {"type": "image", "index": 0, "text": None, "image": PAGE, "url": None, "max_pixels": None},
], ids=lambda part: " ".join(map(str, part))[:30])  # fmt: skip
def test_parts_of_a_message(llm, part):
    """The template places them; one conversation or many, with others of text alone."""
    (prompt,) = llm.chat_prompts([says(part)])
    assert prompt["prompt"] == f"<|im_start|>user\n{ONE}<|im_end|>\n<|im_start|>assistant\n"
    text = [{"role": "user", "content": "Hello"}]
    alone, mixed = (llm.chat(given, THREE, use_tqdm=False) for given in (says(part), [text, says(part), text]))
    expected = tokens_of(run(llm, asks(PAGE, text=prompt["prompt"]), THREE))
    assert tokens_of(alone) == expected == tokens_of(mixed)[1:2]
    assert tokens_of(mixed)[0] == tokens_of(llm.chat(text, THREE, use_tqdm=False))[0]


@pytest.mark.parametrize(("sizes", "num_tokens", "same"), [
    ({}, 15, None), ({"max_pixels": 256}, 2, (8, 16)), ({"min_pixels": 1900}, 40, (40, 64)),
    ({"min_pixels": 64, "max_pixels": 256}, 2, (8, 16)),
    ({"resized_height": 16, "resized_width": 56}, 14, (56, 16)),
    ({"resized_height": 20, "resized_width": 33}, 8, (32, 16)),
    ({"resized_height": 8, "resized_width": 8}, 4, (16, 16)),
    ({"resized_height": 16, "resized_width": 56, "max_pixels": 64}, 14, (56, 16)),
], ids=str)  # fmt: skip
def test_sizes_of_a_part(llm, sizes, num_tokens, same):
    """They were ignored. PAGE has 40 x 24 pixels, a token 8 x 8; the values are those of qwen_vl_utils."""
    given = llm.chat_prompts([says({"type": "image", "image": PAGE, **sizes}),
                              says({"type": "image_url", "image_url": {"url": DATA_URL}, **sizes})])  # fmt: skip
    other = asks(PAGE.resize(same, PILImage.Resampling.BICUBIC) if same else PAGE, text=given[0]["prompt"],
                 mm_processor_kwargs={"max_pixels": 2560})  # fmt: skip
    outputs = run(llm, [*given, other], greedy(3, logprobs=0))
    assert [output.prompt_token_ids.count(IMAGE) for output in outputs] == [num_tokens] * 3
    first, second, third = (output.outputs[0].cumulative_logprob for output in outputs)
    assert first == pytest.approx(second, abs=1e-5) == pytest.approx(third, abs=1e-5)


def test_each_image_has_its_own_size(llm):
    small = {"type": "image", "image": PAGE, "max_pixels": 256}
    (output,) = llm.chat(says(small, {"type": "image", "image": PAGE}), THREE, use_tqdm=False)
    ids = np.array(output.prompt_token_ids) == IMAGE
    assert [len(run) for run in np.split(ids, np.flatnonzero(np.diff(ids)) + 1) if run[0]] == [2, 15]


@pytest.mark.parametrize(("sizes", "why"), [
    ({"max_pixels": 0}, "max_pixels=0 must be an integer >= 1"),
    ({"min_pixels": "9"}, "min_pixels='9' must be an integer"),
    ({"resized_height": 8}, "resized_height of an image needs resized_height and resized_width."),
    ({"min_pixels": 9, "max_pixels": 8}, "min_pixels=9 of an image exceeds its max_pixels=8."),
])  # fmt: skip
def test_sizes_that_are_refused(llm, sizes, why):
    with refuses(why):
        llm.chat(says({"type": "image", "image": PAGE, **sizes}), THREE, use_tqdm=False)


def test_a_template_that_takes_strings(llm):
    """It got a list, and wrote its fields: an image is its placeholder, before the text as in vLLM."""
    for options in ({"chat_template": "{{ messages[0].content }}!"}, {"chat_template_content_format": "string"}):
        for text in ("Read it.", ONE):
            messages = [{"role": "user", "content": [{"type": "text", "text": text}, {"type": "image", "image": PAGE}]}]
            (prompt,) = llm.chat_prompts([messages], **options)
            expected = ONE if text is ONE else ONE.replace("Read", "\nRead")
            assert expected in prompt["prompt"] and run(llm, prompt, THREE)[0]["finish_reason"] == "length"


def test_options_and_modalities_that_change_no_image(llm, answer):
    neutral = {"fps": 2, "do_sample_frames": False, "num_frames": None, "use_fast": True, "videos_kwargs": {"fps": 1}}
    data = {"image": PAGE, "video": [], "videos": None, "audio": ()}
    given = {"prompt": ONE, "multi_modal_data": data, "mm_processor_kwargs": neutral}
    assert tokens_of(run(llm, given, THREE)) == [answer]
    text = {"prompt": "Hello", "multi_modal_data": {"video": []}, "mm_processor_kwargs": neutral}
    assert tokens_of(run(llm, [text, "Hello"], THREE)) == tokens_of(run(llm, ["Hello", text], THREE))
    with refuses("multi_modal_data cannot have 'videos': images only."):
        run(llm, {**given, "multi_modal_data": {"image": PAGE, "videos": [1]}}, THREE)


def with_orientation(turn):
    exif = PILImage.Exif()
    exif[0x0112] = turn
    return exif.tobytes()


@pytest.mark.parametrize("data", [
    encoded(PAGE.convert("L")), encoded(PAGE.convert("1")), encoded(PAGE.convert("CMYK"), "TIFF"),
    encoded(PAGE.convert("CMYK"), "JPEG"), encoded(PAGE.convert("P")), encoded(PAGE.convert("P"), transparency=3),
    encoded(PAGE.convert("LA")), encoded(PAGE.convert("I;16")), encoded(PAGE, "WEBP"), encoded(PAGE, "GIF"),
    encoded(PILImage.merge("RGBA", [*PAGE.split(), PAGE.split()[0]])), encoded(PAGE.convert("YCbCr"), "JPEG"),
    *(encoded(OTHER, "JPEG", exif=with_orientation(turn)) for turn in range(1, 9)),
], ids=lambda _: "")  # fmt: skip
def test_modes_and_orientations_are_those_of_transformers(data):
    from transformers.image_utils import load_image

    expected = load_image(base64.b64encode(data).decode())
    found = open_image(data)
    assert found.mode == "RGB" and found.size == expected.size and found.tobytes() == expected.tobytes()


def test_a_square_image_that_is_turned_is_another_image(llm):
    """Both have the same pixels in the file, and took each other's features from the prefix cache."""
    upright = image(40, 40, 5)
    turned = PILImage.open(io.BytesIO(encoded(upright, exif=with_orientation(3))))
    outputs = run(llm, [asks(upright), asks(turned), asks(upright.rotate(180))], greedy(3, logprobs=0))
    first, second, third = (output.outputs[0].cumulative_logprob for output in outputs)
    assert second == pytest.approx(third, abs=1e-5) and second != pytest.approx(first, abs=1e-5)


def test_one_image_object_in_many_prompts(llm, answer, pages):
    """PIL reads a file when the pixels are asked for: two threads at once read it half."""
    picture = PILImage.open(pages / "page 1.png")
    assert tokens_of(run(llm, [asks(picture)] * 20, THREE)) == [answer] * 20


# ---------------------------------------------------------------- verbs


def test_every_verb_takes_images(llm, answer):
    prompt = asks(PAGE)
    assert tokens_of(llm.stream([prompt, (prompt, THREE)], THREE)) == [answer] * 2
    assert [token for delta in llm.stream(prompt, THREE) for token in delta["token_ids"]] == answer
    future = llm.submit(prompt, THREE)
    assert not future.done() and not llm.is_finished() and future.delta() is None
    while not llm.is_finished():
        llm.step()
    assert future.result()["token_ids"] == answer
    key, found = llm.add_request(prompt, THREE), []
    while not found:
        found, _ = llm.step()
    assert found == [(key, answer)]
    assert run(llm, prompt, THREE)[0].outputs[0].text == llm.detokenize([answer])[0]


def test_parameters_of_requests_with_images(llm, answer):
    several = SamplingParams(n=2, max_tokens=3, top_k=1, ignore_eos=True, logprobs=1, prompt_logprobs=0)
    (output,) = run(llm, asks(PAGE), several)
    assert [each.token_ids for each in output.outputs] == [answer] * 2
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids) and output.prompt == ONE
    yes = greedy(9, structured_outputs=StructuredOutputsParams(choice=["yes"]), ignore_eos=False)
    (output,) = run(llm, asks(PAGE), yes)
    assert output.outputs[0].text == "yes"
    assert tokens_of(run(llm, [asks(PAGE), "x"], [greedy(1), greedy(2)]))[0] == answer[:1]


def test_turns_of_tokens(llm, answer):
    """A second turn may be the tokens of the first, with a token for each of an image, and ids that were sampled."""
    (first,) = run(llm, asks(PAGE), THREE)
    ids = [*first.prompt_token_ids, *answer, IMAGE, 9]
    (second,) = run(llm, {"prompt_token_ids": ids, "multi_modal_data": {"image": PAGE}}, THREE)
    assert second.prompt_token_ids == ids and second["finish_reason"] == "length" and second.num_cached_tokens > 0


def test_beam_search(llm, monkeypatch):
    """An image is loaded once, not for each step of each beam."""
    loaded = []
    monkeypatch.setattr(loading, "open_image", lambda source: loaded.append(source) or open_image(source))
    (found,) = llm.beam_search(asks(OTHER), BeamSearchParams(beam_width=1, max_tokens=4, ignore_eos=True))
    (output,) = run(llm, asks(OTHER), greedy(4))
    assert found.sequences[0].tokens[-4:] == output["token_ids"] and len(loaded) == 2  # one by ``run``


def test_embed(llm):
    same, other, again = (llm.embed(asks(x))[0].embedding for x in (PAGE, OTHER, PNG))
    assert np.allclose(same, again, atol=1e-5) and not np.allclose(same, other, atol=1e-2)
    with refuses("the image cannot be read"):
        llm.embed([asks(PAGE), asks(b"no image")])


def test_engine_thread(path, answer):
    engine = EngineThread(str(path), device="cpu", kvcache_block_size=16, num_kvcache_blocks=200, max_model_len=600,
                          quiet=True)  # fmt: skip
    with ThreadPoolExecutor(4) as threads:
        given = [asks(PAGE), "x", asks(b"no image"), asks(PNG)] * 3
        futures = list(threads.map(lambda prompt: engine.submit(prompt, THREE), given))
        outputs = [future.result(60) for future in futures]
    assert [x["finish_reason"] for x in outputs] == ["length", "length", "error", "length"] * 3
    assert outputs[0]["token_ids"] == outputs[3]["token_ids"] == answer


def test_cancelled_before_its_image_is_there(llm, answer, monkeypatch):
    futures = [llm.submit(asks(x), THREE) for x in (PAGE, OTHER, PAGE)]
    assert futures[1].cancel() and futures[1].cancelled()
    assert [futures[i].result()["token_ids"] for i in (0, 2)] == [answer] * 2 and llm.is_finished()


def test_several_images(llm):
    """Of a prompt or a conversation, in the order of their places."""
    two = "<|vision_start|><|image_pad|><|vision_end|>and " + ONE
    given = (PAGE, OTHER), (OTHER, PAGE), (PNG, OTHER)
    outputs = run(llm, [asks(*each, text=two) for each in given], greedy(3, logprobs=0))
    forth, back, again = (output.outputs[0].cumulative_logprob for output in outputs)
    assert forth == pytest.approx(again, abs=1e-5) and forth != pytest.approx(back, abs=1e-5)
    parts = {"type": "image", "image": PAGE}, {"type": "text", "text": "and "}, {"type": "image", "image": OTHER}
    (prompt,) = llm.chat_prompts([says(*parts)])
    assert prompt["prompt"].count("<|image_pad|>") == 2 and prompt["multi_modal_data"]["image"] == [PAGE, OTHER]


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(("prompt", "why"), [
    (asks(), "1 image placeholders (token 190) and 0 images"), (ONE, "1 image placeholders (token 190) and 0 images"),
    ({"prompt": ONE, "multi_modal_data": {}}, "1 image placeholders (token 190) and 0 images"),
    (asks(PAGE, text="Read."), "0 image placeholders (token 190) and 1 images"),
    (asks(PAGE, OTHER), "1 image placeholders (token 190) and 2 images"),
    (asks(*[PAGE] * 4, text=ONE * 4), "4 images; LLM(limit_mm_per_prompt={'image': 3}) allows 3"),
    ({"prompt": ONE, "multi_modal_data": {"video": [1]}}, "multi_modal_data cannot have 'video'"),
    ({"prompt": ONE, "multi_modal_data": {"audio": 1, "image": PAGE}}, "multi_modal_data cannot have 'audio'"),
    ({"prompt": ONE, "multi_modal_data": [PAGE]}, "multi_modal_data must be a dictionary"),
    (asks(PAGE, mm_processor_kwargs={"max_pixel": 4}), "no option 'max_pixel'. Did you mean 'max_pixels'?"),
    (asks(PAGE, mm_processor_kwargs={"patch_size": 8}), "has patch_size=8, and the vision tower of config.json 4"),
    (asks(PAGE, mm_processor_kwargs=3), "mm_processor_kwargs must be a dictionary"),
    (asks(PAGE, encoder_prompt="x"), "cannot have 'encoder_prompt'"),
    (asks(PAGE, text=ONE + "x" * 599), "at most 599 fit"), (asks(), "0 images"),
    ({"prompt_token_ids": [5, IMAGE, 999], "multi_modal_data": {"image": PAGE}}, "token id 999 is outside"),
])  # fmt: skip
def test_a_form_that_is_wrong_refuses_the_call(llm, prompt, why):
    """By every verb, before anything runs."""
    refused_by_every_verb(llm, prompt, THREE, why)
    with refuses("prompt 1: "):
        run(llm, [[1, 2], prompt], THREE)


@pytest.mark.parametrize(("params", "why"), [
    (greedy(3, truncate_prompt_tokens=5), "truncate_prompt_tokens cannot cut a prompt that has more than tokens."),
    (greedy(3, logprobs=99), "logprobs=99 must be at most"), (greedy(3, stop_token_ids=[999]), "999 is outside"),
    (greedy(3, structured_outputs=StructuredOutputsParams(regex="(")), "regex"), ("x", "must be a SamplingParams"),
])  # fmt: skip
def test_parameters_that_are_wrong_refuse_the_call(llm, params, why):
    """``generate`` made an error of a request that ``add_request`` refused."""
    refused_by_every_verb(llm, asks(PAGE), params, why)


def refused_by_every_verb(llm, prompt, params, why):
    before = llm.metrics()
    for use in (lambda: run(llm, [[1, 2], prompt], params), lambda: run(llm, prompt, params),
                lambda: llm.submit(prompt, params), lambda: llm.add_request(prompt, params),
                lambda: list(llm.stream(prompt, params)), lambda: list(llm.stream([prompt], params))):  # fmt: skip
        with refuses(why):
            use()
    assert llm.is_finished() and llm.metrics() == before


def test_a_prompt_too_large_for_the_cache_refuses_the_call(path, caplog):
    with engine(path, num_kvcache_blocks=20) as llm:
        prompt = asks(PAGE, text=ONE + "x" * 300)
        refused_by_every_verb(llm, prompt, greedy(90), "KV blocks of 16 tokens; the cache has 20.")
        assert not caplog.messages


@pytest.mark.parametrize(("part", "why"), [
    ({"type": "video_url", "video_url": {"url": "x"}}, "'video_url'"), ({"type": "video", "video": "x"}, "'video'"),
    ({"type": "input_audio", "input_audio": {}}, "'input_audio'"), ({"type": "audio_url"}, "'audio_url'"),
    ({"type": "image_url"}, "must have 'image_url'"), ({"type": "image"}, "must have 'image' or 'url' or 'path'"),
    ({"type": "image", "url": DATA_URL, "image": PAGE}, "must have"), (3, "'int'"),
    ({"type": "video", "video": "x"}, "of type 'text' or 'image_url' or 'input_image' or 'image_pil' or 'image'"),
    ({"video_url": {"url": "x"}}, "not 'video_url'"),
    ({"type": "image", "index": 0, "text": None}, "must have 'image'"),
    ({"type": "image", "image": PAGE, "text": "x"}, "not 'text' and 'image'"),
    ({"type": "image_url", "image_url": {}}, "must have 'image_url'"),
    ({"type": "text", "text": "x", "image": PAGE}, "not 'text' with 'text' and 'image'"),
])  # fmt: skip
def test_parts_that_are_refused(llm, part, why):
    """By name, beside an image too: the template would pass over them."""
    for parts in ([part], [{"type": "image", "image": PAGE}, part]):
        with refuses(why):
            llm.chat(says(*parts), THREE, use_tqdm=False)


def bomb(width, height):
    """A PNG of a few bytes, whose header promises more."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(bytes(1000))), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )


BAD = {
    "no image": (b"no image", "it is none of JPEG, PNG"),
    "empty": (b"", "it is none of JPEG, PNG"),
    "cut": (encoded(image(300, 300, 4), "JPEG")[:900], "the image cannot be read"),
    "cut PNG": (encoded(image(300, 300, 4))[:9000], "the image cannot be read"),
    "bomb": (bomb(9_000, 9_900), "9,000 x 9,900 pixels; allowed are 89,000,000"),
    "huge bomb": (bomb(100_000, 100_000), "decompression bomb"),
    "PIL bomb": (PILImage.new("1", (9_000, 9_900)), "9,000 x 9,900 pixels; allowed are 89,000,000"),
    "EPS": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "it is none of JPEG, PNG"),
    "SVG": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "it is none of JPEG, PNG"),
    "ratio": (image(4, 1200, 1), "the image processor cannot take this image"),
    "floats": (np.zeros((4, 4, 3)), "must be uint8 [H, W, 3]"),
    "shape": (np.zeros((2, 4, 4, 3), np.uint8), "must be uint8 [H, W, 3]"),
    "type": (3.5, "an image must be a PIL image"),
    "none": ({"bytes": None, "path": None}, "an image must be a PIL image"),
    "no base64": ("data:image/png;base64,A", "no base64"),
    "no data URL": ("data:image/png,xyz", "a data URL must be"),
    "..": ("../page 1.png", "lies outside allowed_local_media_path"),
    "quoted ..": ("file:///PAGES/%2e%2e/page%201.png", "lies outside allowed_local_media_path"),
    "link": ("out.png", "lies outside allowed_local_media_path"),
    "absolute": ("/etc/hostname", "lies outside allowed_local_media_path"),
    "directory": (".", "is no regular file"),
    "missing": ("nowhere.png", "cannot be read: No such file"),
    "null": ("a\0b", "cannot be read"),
    "host": ("http://localhost:PORT/page.png", "must name its host 'localhost'. Allowed: ['127.0.0.1']"),
    "user": ("http://127.0.0.1@localhost:PORT/page.png", "must name its host 'localhost'"),
    "redirect": ("SITE/to?http://localhost:PORT/page.png", "must name its host 'localhost'"),
    "redirect to a file": ("SITE/to?file:///etc/hostname", "Redirection to url 'file:///etc/hostname' is not allowed"),
    "redirect to FTP": ("SITE/to?ftp://127.0.0.1/page.png", "must name its host"),
    "404": ("SITE/missing", "cannot be fetched: HTTP Error 404"),
    "ftp": ("ftp://127.0.0.1/page.png", "cannot be read: No such file"),
    "closed": ("http://127.0.0.1:9/page.png", "cannot be fetched"),
    "places": (asks(PAGE, text=ONE * 2), "2 image placeholders (token 190) and 1 images"),
    "long": (asks(*[image(90, 90, i) for i in range(3)], text=ONE * 3 + "x" * 560), "max_model_len"),
}


@pytest.mark.filterwarnings("default::PIL.Image.DecompressionBombWarning")
def test_one_bad_image_is_the_error_of_its_request(llm, answer, pages, site):
    """The others go on; nothing was read that is not allowed."""


    def bad(x):
        if isinstance(x, str):
            x = x.replace("PAGES", str(pages).strip("/")).replace("SITE", site)
            x = x.replace("PORT", site.rpartition(":")[2])
        return x if isinstance(x, dict) and "prompt" in x else asks(x)

    outputs = run(llm, [prompt for x, _ in BAD.values() for prompt in (asks(PAGE), bad(x))], THREE)
    assert tokens_of(outputs[::2]) == [answer] * len(BAD)
    for (name, (_, why)), output in zip(BAD.items(), outputs[1::2], strict=True):
        assert output["finish_reason"] == "error" and output["token_ids"] == [], name
        assert why in why_of(output), (name, why_of(output))
        assert output.outputs[0].text == "", name


def test_an_error_names_the_image(llm):
    (output,) = run(llm, asks(PAGE, b"x", text=ONE * 2), SamplingParams(n=2))
    assert [each.finish_reason for each in output.outputs] == ["error"] * 2
    assert why_of(output).startswith("image 1: the image cannot be read")
    with refuses("image 1: the image cannot be read"):
        llm.add_request(asks(PAGE, b"x", text=ONE * 2), THREE)


def test_sequences_that_cannot_be_made_are_their_requests_error(llm, answer, monkeypatch):
    """They are made when the images are there, between two steps of all."""

    def make(seq):
        raise ValueError("no room")

    monkeypatch.setattr(llm._inputs._token_processors, "make", make)
    futures = [llm.submit(asks(PAGE), params) for params in (THREE, greedy(3, logprobs=1), THREE)]
    first, second, third = (future.result() for future in futures)
    assert first["token_ids"] == third["token_ids"] == answer
    assert second["finish_reason"] == "error" and "no room" in why_of(second)


def test_bounds_of_bytes(llm, monkeypatch):
    monkeypatch.setattr(sources, "MAX_BYTES", 100)
    outputs = run(llm, [asks(PNG), asks("page 1.png"), asks(DATA_URL)], THREE)
    assert all("the image has more than" in why_of(output) for output in outputs)


def test_an_image_that_its_owner_has_closed(llm, pages):
    """The reason was empty."""
    with PILImage.open(pages / "page 1.png") as opened:
        pass
    assert "A PIL image must stay open until its request is finished." in why_of(run(llm, asks(opened), THREE)[0])


def test_bound_of_a_fetch(llm, site, monkeypatch):
    """A server that sends a byte now and then held a thread for as long as it liked."""
    monkeypatch.setattr(sources, "FETCH_S", 0)
    (output,) = run(llm, asks(site), THREE)
    assert "cannot be fetched: it takes more than 0 s" in why_of(output)


def test_perplexity_takes_no_images(llm):
    """The images were left out without a word."""
    with refuses("text 1: perplexity is that of tokens alone"):
        llm.perplexity(["abc", asks(PAGE)], use_tqdm=False)


def test_a_relative_directory_is_that_of_the_start(path, pages, monkeypatch):
    monkeypatch.chdir(pages.parent)
    with engine(path, allowed_local_media_path="pages") as llm:
        monkeypatch.chdir("/")
        assert run(llm, asks("page 1.png"), THREE)[0]["finish_reason"] == "length"


def test_options(path, pages):
    with refuses("the image processor has no option 'max_pixel'. Did you mean 'max_pixels'?", ConfigError):
        engine(path, mm_processor_kwargs={"max_pixel": 3})
    with refuses("limit_mm_per_prompt=3 must be a dictionary", ConfigError):
        engine(path, limit_mm_per_prompt=3)
    with refuses("allowed_local_media_path='/nowhere' must be a directory", ConfigError):
        engine(path, allowed_local_media_path="/nowhere")
    big = image(90, 90, 3)
    with engine(path, mm_processor_kwargs={"max_pixels": 400}, limit_mm_per_prompt={"image": 1}) as small:
        outputs = [run(small, asks(big, mm_processor_kwargs=own), THREE)[0] for own in ({}, {"max_pixels": 2000}, None)]
        counts = [output.prompt_token_ids.count(IMAGE) for output in outputs]
        assert 4 <= counts[0] == counts[2] <= 400 // 64 < counts[1] <= 2000 // 64
        for source in ("page 1.png", str(pages / "page 1.png"), (pages / "page 1.png").as_uri()):
            (output,) = run(small, asks(source), THREE)
            assert "LLM(allowed_local_media_path=...) must name a directory that holds it" in why_of(output)
        (output,) = run(small, asks("https://x.org/"), THREE)
        assert "must name its host 'x.org'. Allowed: []" in why_of(output)
        with refuses("2 images; LLM(limit_mm_per_prompt={'image': 1}) allows 1"):
            run(small, asks(PAGE, PAGE, text=ONE * 2), THREE)


def test_engines_that_take_no_images(path, tmp_path, monkeypatch, answer):
    """And why; their text is as ever."""
    with engine(path) as llm:
        text = tokens_of(run(llm, "Hello", THREE))
    with engine(path, language_model_only=True) as llm:
        assert tokens_of(run(llm, "Hello", THREE)) == text
        for use in (lambda: run(llm, asks(PAGE), THREE), lambda: llm.submit(asks(PAGE)), lambda: llm.chat(
                says({"type": "image", "image": PAGE}))):  # fmt: skip
            with refuses("this engine takes no images: it was made with language_model_only=True."):
                use()
    monkeypatch.setattr(vision, "find_spec", lambda name: None if name == "PIL" else name)
    missing = "this engine takes no images: they need pillow; pip install '.[vision]' in the checkout"
    with engine(path) as llm, refuses(missing):
        assert tokens_of(run(llm, "Hello", THREE)) == text
        run(llm, asks(PAGE), THREE)


def test_a_checkpoint_without_its_tower(path, tmp_path):
    from safetensors.torch import load_file, save_file

    for file in path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(path / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "visual" not in name}
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    with engine(tmp_path) as llm:
        assert run(llm, "Hello", THREE)[0]["finish_reason"] == "length"
        with refuses("a prompt dictionary cannot have 'multi_modal_data'"):
            run(llm, asks(PAGE), THREE)
        with refuses("not 'image'"):
            llm.chat(says({"type": "image", "image": PAGE}), THREE)


@pytest.mark.parametrize(("file", "edit", "why"), [
    ("config.json", lambda raw: raw.update(image_token_id=200), "image_token_id=200 must be below vocab_size=200"),
    ("config.json", lambda raw: raw["text_config"]["rope_parameters"].update(mrope_section=[6, 6, 5]),
     r"mrope_section=\[6, 6, 5\] must sum to 16, half the rotary dimensions"),
    ("preprocessor_config.json", lambda raw: raw.update(merge_size=4),
     "has merge_size=4, and the vision tower of config.json 2"),
    ("preprocessor_config.json", lambda raw: raw.clear(), "has patch_size=14, and the vision tower of config.json 4"),
])  # fmt: skip
def test_a_checkpoint_that_contradicts_itself(path, tmp_path, file, edit, why):
    """Refused by name; its first image ended a step, and all requests of it."""
    shutil.copytree(path, tmp_path, dirs_exist_ok=True)
    raw = json.loads((tmp_path / file).read_text())
    edit(raw)
    (tmp_path / file).write_text(json.dumps(raw))
    with pytest.raises((CheckpointError, RequestError), match=why), engine(tmp_path) as llm:
        run(llm, asks(PAGE), THREE)


# ---------------------------------------------------------------- memory


def test_a_job_holds_a_window_of_images(llm, monkeypatch):
    """Of 2,000 pages, 200 of which have a million pixels: 600 MB when they are decoded."""
    alive, most = weakref.WeakSet(), []
    original = loading.Image.__init__

    def init(self, *args):
        original(self, *args)
        alive.add(self)
        most.append(len(alive))

    monkeypatch.setattr(loading.Image, "__init__", init)
    big, small = (encoded(image(side, side, 6), "JPEG") for side in (1000, 16))
    prompts = [asks(big if i % 10 == 0 else small, text=f"{i} {ONE}") for i in range(2000)]
    run(llm, prompts[:100], greedy(1))
    before, most[:] = resident(), []
    outputs = run(llm, prompts, greedy(1))
    grown = resident() - before
    assert {output["finish_reason"] for output in outputs} == {"length"} and len(most) == 2000
    assert max(most) < 100 and grown < 160 << 20, (max(most), grown)
    list(llm.stream(prompts[:8], greedy(1)))
    assert llm.submit(prompts[0], greedy(1)).result()["finish_reason"] == "length"
    gc.collect()
    assert not alive and llm._inputs.attachments.num_bytes == 0


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
