"""Images as users give them, permissions, and errors by name; numbers are those of tests/test_vision.py."""

import _thread
import base64
import gc
import io
import json
import os
import shutil
import struct
import threading
import time
import weakref
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer
from threading import Event, Thread, Timer
from time import monotonic, sleep

import numpy as np
import pytest
import vision_families
from helpers import greedy, refuses, run, run_python, tokens_of
from PIL import Image as PILImage
from vision_families import IMAGE, image

from nanovllm import LLM, CheckpointError, ConfigError, RequestError, SamplingParams, StructuredOutputsParams
from nanovllm.contrib.beam_search import BeamSearchParams
from nanovllm.engine.images import fetching, loading, sources
from nanovllm.engine.images.decoding import open_image
from nanovllm.integrations.engine_thread import EngineThread
from nanovllm.models import vision

PAGE, OTHER = image(40, 24, 1), image(33, 70, 2)
ONE = "<|vision_start|><|image_pad|><|vision_end|>Read it."
THREE = greedy(3)


def encoded(picture, kind="PNG", **options):
    buffer = io.BytesIO()
    picture.copy().save(buffer, kind, **options)  # PIL remembers a JPEG's options for the next TIFF
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
            port, to = self.server.server_address[1], self.path.partition("to?")[2]
            self.send_response(302 if to else 404 if "missing" in self.path else 200)
            if to:
                self.send_header("Location", to.replace("PORT", str(port)))
            self.end_headers()
            self.wfile.write(b"" if to else b"no image" if "none" in self.path else PNG)

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
    {"type": "image", "base64": base64.b64encode(PNG).decode()}, {"type": "image", "base64": DATA_URL},
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
    encoded(PAGE.convert("CMYK"), "JPEG"), encoded(PAGE.convert("P")), encoded(PAGE.convert("LA")),
    encoded(PAGE, "WEBP"), encoded(PAGE, "GIF"), encoded(PAGE.convert("YCbCr"), "JPEG"), encoded(PAGE, "BMP"),
    encoded(PAGE, "PPM"), encoded(PAGE, "TIFF", compression="tiff_lzw"), encoded(PAGE, "JPEG2000"),
    *(encoded(OTHER, "JPEG", exif=with_orientation(turn)) for turn in range(1, 9)),
], ids=lambda _: "")  # fmt: skip
def test_modes_and_orientations_are_those_of_transformers(data):
    from transformers.image_utils import load_image

    expected = load_image(base64.b64encode(data).decode())
    found = open_image(data)
    assert found.mode == "RGB" and found.size == expected.size and found.tobytes() == expected.tobytes()


def colours(source):
    """Of the first row of an image as the tower gets it."""
    picture = open_image(source)
    assert picture.mode == "RGB"
    return [picture.getpixel((x, 0)) for x in range(picture.width)]


RED, WHITE, GREY = (200, 0, 0), (255, 255, 255), (60, 60, 60)  # GREY: 0.299 of RED
CLEAR = PILImage.fromarray(np.array([[[200, 0, 0, 255], [0, 0, 0, 0]]], np.uint8))  # RED, and a black that is not seen
PALETTE, KEYED = PILImage.new("P", (2, 1)), PILImage.new("P", (2, 1))
PALETTE.putpalette([200, 0, 0, 0, 0, 0])
KEYED.putpalette([200, 0, 0, 255, 0, 0, 0, 0], "RGBA")
for each in (PALETTE, KEYED):
    each.putpixel((1, 0), 1)


def png(width, height, depth, colour, rows=b"", transparency=b"", between=()):
    """A PNG of raw rows, each of which begins with its filter."""
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)), *between]
    chunks += [(b"tRNS", transparency)] if transparency else []
    chunks += [(b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )


@pytest.mark.parametrize(("source", "expected"), [
    (CLEAR, [RED, WHITE]), (encoded(CLEAR), [RED, WHITE]), (encoded(CLEAR, "WEBP", lossless=True), [RED, WHITE]),
    (encoded(CLEAR, "TIFF"), [RED, WHITE]), (CLEAR.convert("RGBa"), [RED, WHITE]),
    (CLEAR.convert("LA"), [GREY, WHITE]), (encoded(CLEAR.convert("LA")), [GREY, WHITE]),
    (CLEAR.convert("PA"), [RED, WHITE]), (KEYED, [RED, WHITE]), (encoded(PALETTE, transparency=1), [RED, WHITE]),
    (PILImage.open(io.BytesIO(encoded(PALETTE, transparency=1))), [RED, WHITE]),
    (encoded(PALETTE, transparency=b"\xff\x80"), [RED, (127, 127, 127)]),
    (encoded(PALETTE, "GIF", transparency=1), [RED, WHITE]),
    (encoded(CLEAR.convert("RGB"), transparency=(0, 0, 0)), [RED, WHITE]),
    (encoded(CLEAR.convert("L"), transparency=0), [GREY, WHITE]),
    (encoded(PILImage.new("1", (1, 1)), transparency=0), [WHITE]),
    # a key of 16 bits, in colours and in grey
    (png(2, 1, 16, 2, b"\0" + b"\xc8\x00\0\0\0\0" + b"\x12\x34" * 3, b"\x12\x34" * 3), [RED, WHITE]),
    (png(2, 1, 16, 0, b"\0\x3c\x99\0\x01", b"\0\x01"), [GREY, WHITE]),
], ids=lambda _: "")  # fmt: skip
def test_transparent_images_are_on_white(source, expected):
    """Their black was black: a page whose background is transparent was a black page."""
    before = source.tobytes() if hasattr(source, "tobytes") else None
    assert colours(source) == expected
    assert before is None or source.tobytes() == before


def test_every_form_of_a_transparent_image_is_on_white(llm):
    """A data URL, bytes, an array [H, W, 4] and a PIL image are the same image as the one on white."""
    clear = PILImage.merge("RGBA", [*PAGE.split(), image(40, 24, 9).split()[0].point(lambda x: 255 * (x > 99))])
    seen = np.array(clear)
    seen = np.where(seen[..., 3:] > 0, seen[..., :3], 255).astype(np.uint8)
    data = encoded(clear)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    outputs = run(llm, [asks(x) for x in (seen, clear, data, url, np.array(clear))], greedy(3, logprobs=0))
    first, *others = (output.outputs[0].cumulative_logprob for output in outputs)
    assert others == pytest.approx([first] * 4, abs=1e-5)


DEEP = np.array([[0x0000, 0x3C99, 0x80FF, 0xFFFF]])  # whose upper bytes are these greys
GREYS = [(0, 0, 0), GREY, (128, 128, 128), WHITE]


def deep(mode):
    return PILImage.frombytes(mode, (4, 1), DEEP.astype(">u2" if mode == "I;16B" else "<u2").tobytes())


def tiff(values, kind, *pages, **tags):
    """A little-endian TIFF of one row; further pages are given by their kinds (254)."""
    data = np.asarray(values).tobytes()
    body, offset = b"II*\0" + struct.pack("<L", 8 + len(data)) + data, 8 + len(data)
    for page in (kind, *pages):
        found = {254: page, 256: len(values), 257: 1, 258: 16, 259: 1, 262: 1, 273: 8, 277: 1, 278: 1, 279: len(data)}
        found |= {int(tag[1:]): value for tag, value in tags.items()}
        fields = b"".join(struct.pack("<HHLL", tag, 4, 1, value) for tag, value in sorted(found.items()))
        offset += 2 + len(fields) + 4
        body += struct.pack("<H", len(found)) + fields + struct.pack("<L", offset)
    return body[:-4] + bytes(4)


@pytest.mark.parametrize("source", [
    deep("I;16"), deep("I;16B"), encoded(deep("I;16")), encoded(deep("I;16"), "TIFF"), encoded(deep("I;16B"), "TIFF"),
    encoded(deep("I;16"), "TIFF", compression="tiff_deflate"), encoded(deep("I;16"), "JPEG2000"),
    PILImage.open(io.BytesIO(encoded(deep("I;16")))), b"P5 4 1 65535\n" + DEEP.astype(">u2").tobytes(),
    tiff(DEEP[0].astype("<u2"), 0), tiff(0xFFFF - DEEP[0].astype("<u2"), 0, t262=0),  # 0 is white
], ids=lambda _: "")  # fmt: skip
def test_grey_of_16_bits_is_its_upper_byte(source):
    """It was clipped at 255: a white page."""
    assert colours(source) == GREYS


@pytest.mark.parametrize("source", [
    PILImage.new("I", (4, 1)), PILImage.new("F", (4, 1)), encoded(PILImage.new("I", (4, 1)), "TIFF"),
    encoded(PILImage.new("F", (4, 1)), "TIFF"), tiff(DEEP[0].astype("<u2"), 0, t339=2),  # signed
], ids=lambda _: "")  # fmt: skip
def test_modes_of_an_unknown_range_are_refused(source):
    with refuses("and the range of its values is not known. Scale them to 0 ... 255 and give mode 'L'."):
        open_image(source)


def test_a_tiff_of_several_pages_is_refused():
    """Its first page was answered; a thumbnail or a mask of a page is none of its own."""
    three = encoded(PAGE, "TIFF", save_all=True, append_images=[OTHER.copy(), PAGE.copy()])
    for source in (three, PILImage.open(io.BytesIO(three))):
        with refuses("the image is a TIFF of 3 pages; give each page as an image of its own"):
            open_image(source)
    values = DEEP[0].astype("<u2")
    assert colours(tiff(values, 0, 1, 4)) == GREYS  # a thumbnail and a mask
    with refuses("a TIFF of 2 pages"):
        open_image(tiff(values, 0, 1, 0))
    picture = PILImage.open(io.BytesIO(three))
    picture.seek(1)
    assert open_image(picture.copy()).tobytes() == OTHER.tobytes()


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "MPO", "AVIF"])
def test_of_moving_images_the_first_frame(kind):
    frames = [PILImage.new("RGB", (16, 16), colour) for colour in ((255, 0, 0), (0, 255, 0))]
    red, green, _ = colours(encoded(frames[0], kind, save_all=True, append_images=frames[1:]))[0]
    assert red > 240 and green < 10


# ---------------------------------------------------------------- work


def gif(width, height):
    """Of one pixel, on a screen of any size."""
    return b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + b"\0\0\0\xff\xff\xff" + (
        b"," + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\x02\x02\x44\x01\x00;")  # fmt: skip


def progressive(side, num_scans):
    """A JPEG whose last scan is there again and again."""
    data = encoded(PILImage.new("L", (side, side)), "JPEG", progressive=True)
    return data[:-2] + data[data.rfind(b"\xff\xda") : -2] * num_scans + data[-2:]


SEGMENT = b"\xff\xfe\0\x02"  # a comment of a JPEG, without text
WORK = {
    "scans": lambda: progressive(2000, 400),
    "JPEG 2000": lambda: encoded(PILImage.new("L", (1, 1)), "JPEG2000").replace(
        struct.pack(">II", 1, 1), struct.pack(">II", 9000, 9000)),
    "markers": lambda: encoded(PAGE, "JPEG").replace(b"\xff\xd8", b"\xff\xd8" + SEGMENT * 100_000, 1),
    "chunks": lambda: png(1, 1, 8, 0, b"\0\0", between=[(b"teSt", b"")] * 100_000),
    "lines": lambda: gif(1, 1).replace(b",", b"\x21\xfe" + b"\x01 " * 150_000 + b"\0,", 1),
    "text": lambda: b"P2 2000 1000 255\n" + b"0 " * 2_500_000,
    "comments": lambda: b"P2 20 10 255\n" + b"#\n" * 50_000 + b"0 " * 200,
    "values": lambda: b"P5 1000 1000 100\n" + bytes(1_000_000),
    "strips": lambda: tiff(DEEP[0].astype("<u2"), 0).replace(struct.pack("<HHL", 273, 4, 1),
                                                             struct.pack("<HHL", 273, 4, 100_000)),
    "deep PNG": lambda: png(9000, 9000, 16, 6, b""),
    "EXIF": lambda: png(1, 1, 8, 0, b"\0\0", between=[(b"eXIf", b"II*\0" + bytes(200_000))]),
}  # fmt: skip


WHY = {"EXIF": "200,010 bytes of EXIF data; allowed are 131,072",
       **dict.fromkeys(("markers", "chunks", "lines", "values"), "it has too many parts")}  # fmt: skip


@pytest.mark.parametrize("name", WORK)
def test_a_file_that_works_for_long_is_refused(name):
    """Each of these, or a larger one within the limits of bytes and pixels, held a thread for seconds to hours."""
    data = WORK[name]()
    assert len(data) < sources.MAX_BYTES
    with refuses(WHY.get(name, "the image takes more than a second to decode: ")):
        open_image(data)


def test_files_that_are_within_the_bounds():
    """What scanners and cameras make: A4 with 600 dpi in bits and with 300 dpi in colours; a screen around a pixel."""
    for data in (encoded(PILImage.new("1", (4960, 7016)), "TIFF", compression="group4"), gif(9000, 9000),
                 encoded(PILImage.new("RGB", (2480, 3508)), "JPEG", progressive=True)):  # fmt: skip
        assert open_image(data).width >= 2480


@pytest.mark.parametrize("source", [PILImage.new("RGB", (0, 5)), np.zeros((5, 0, 3), np.uint8)], ids=["PIL", "array"])
def test_an_image_without_pixels_is_refused(llm, source):
    """Gemma 3 saw a black square; other processors divided by zero."""
    assert "the image is empty: it has 0 x " in why_of(run(llm, asks(source), THREE)[0])


@pytest.mark.parametrize("limit", [10, None])
def test_pils_own_limit_never_speaks(monkeypatch, limit):
    """It warned above 89 million pixels, where warnings may be errors, and raised at twice that."""
    monkeypatch.setattr(PILImage, "MAX_IMAGE_PIXELS", limit)
    assert open_image(PNG).tobytes() == PAGE.tobytes()
    monkeypatch.undo()
    for side in (9_434, 9_470, 20_000):  # below PIL's, above it, above twice it
        for data in (png(side, side, 8, 2), gif(side, side)):
            with refuses(f"the image has {side:,} x {side:,} pixels; allowed are 89,000,000."):
                open_image(data)


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


BAD = {
    "no image": (b"no image", "it is none of JPEG, PNG"),
    "empty": (b"", "it is none of JPEG, PNG"),
    "cut": (encoded(image(300, 300, 4), "JPEG")[:900], "the image cannot be read"),
    "cut PNG": (encoded(image(300, 300, 4))[:9000], "the image cannot be read"),
    "bomb": (png(9_000, 9_900, 8, 2), "9,000 x 9,900 pixels; allowed are 89,000,000"),
    "huge bomb": (png(100_000, 100_000, 8, 2), "100,000 x 100,000 pixels; allowed are"),
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


OK = b"HTTP/1.1 200 OK\r\n"
DRIPS = {  # sent at once, and then again and again
    "status": (b"HTTP/1.1 ", b"2"), "headers": (OK, b"X-More: x\r\n"),
    "continue": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "a header": (OK + b"X: ", b"x"), "body": (OK + b"Content-Length: 999999\r\n\r\n", b"x"),
    "body without length": (OK + b"\r\n", b"x"), "chunks": (OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
    "size of a chunk": (OK + b"Transfer-Encoding: chunked\r\n\r\n1;", b"x"),
    "trailers": (OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"X: x\r\n"), "nothing": (b"", b""),
    "error": (b"HTTP/1.1 404 Not Found\r\nContent-Length: 99\r\n", b"X: x\r\n"),
    "redirects": (b"HTTP/1.1 302 Found\r\nLocation: /\r\n", b"X: x\r\n"),
}  # fmt: skip


@contextmanager
def dripping(at_once, again):
    """A server that sends a piece every 20 ms, until its client has gone; and the clients that have come."""

    class Handler(StreamRequestHandler):
        def handle(self):
            clients.append(self)
            with suppress(OSError):
                self.wfile.write(at_once)
                while not is_over.wait(0.02):
                    self.wfile.write(again)
            clients.remove(self)

    clients, is_over = [], Event()
    with ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", clients
        is_over.set()
        server.shutdown()


@pytest.mark.parametrize("name", DRIPS)
def test_bound_of_a_fetch(monkeypatch, name):
    """A server that sends a byte now and then held a thread for as long as it liked, in whatever it sends."""
    monkeypatch.setattr(fetching, "FETCH_S", 0.3)
    with dripping(*DRIPS[name]) as (url, clients):
        start = monotonic()
        with refuses("cannot be fetched: it takes more than 0.3 s"):
            fetching.fetch(url, ("127.0.0.1",), 100)
        assert monotonic() - start < 5
        if name != "nothing":  # the connection and its thread have ended; a server that sends nothing does not see it
            while clients or any(thread.name == "nanovllm-fetch" for thread in threading.enumerate()):
                assert monotonic() - start < 10
                sleep(0.01)


def test_bound_of_looking_up_a_host(llm, monkeypatch):
    """And of all that has no bound of its own; other images go on meanwhile."""
    is_over = Event()
    monkeypatch.setattr(fetching, "FETCH_S", 0.3)
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: is_over.wait(20))
    first, second = run(llm, [asks("http://127.0.0.1/a"), asks(PNG)], THREE)
    is_over.set()
    assert "cannot be fetched: it takes more than 0.3 s" in why_of(first) and second["finish_reason"] == "length"


def test_ctrl_c_while_a_host_is_slow(llm, answer, heard_sigint):
    with dripping(*DRIPS["body"]) as (url, _):
        Timer(0.3, _thread.interrupt_main).start()
        with pytest.raises(KeyboardInterrupt):
            run(llm, [asks(url)] * 40, THREE)
    assert tokens_of(run(llm, asks(PAGE), THREE)) == [answer]


SLOW = """
import sys, time
from types import SimpleNamespace
from nanovllm.config import Config
from nanovllm.engine.images import loading
from nanovllm.models.vision import VisionConfig

config = Config(sys.argv[1], allowed_media_domains=["*"])
loader = loading.ImageLoader(VisionConfig.of(config), config, SimpleNamespace(tokenizer=None))
images = [loader.threads.submit(loader.load, sys.argv[2], {}) for _ in range(40)]
while not any(image.running() for image in images):
    time.sleep(0.01)
print(time.time())
"""


def test_the_interpreter_waits_for_no_host(path):
    """Its end waited for the threads of images, those in the queue too, and so for as long as hosts liked."""
    with dripping(*DRIPS["body"]) as (url, _):
        done = run_python("-c", SLOW, path, url)
        assert time.time() - float(done.stdout) < 30 and done.stderr == ""


def test_credentials_of_a_url(site):
    """They are a header for their host; they were taken for its port, which an error named."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append((self.path, self.headers["Host"], self.headers["Authorization"]))
            self.send_response(302 if self.path == "/a" else 200)
            self.send_header("Location", site + "/page.png")
            self.end_headers()
            self.wfile.write(b"there" if self.path != "/a" else b"")

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        host = f"127.0.0.1:{server.server_address[1]}"
        assert fetching.fetch(f"http://me:pass%20word@{host}/b?x=1", ("*",), 99) == b"there"
        assert fetching.fetch(f"http://me:x@{host}/a", ("*",), 1 << 20) == PNG
        server.shutdown()
    assert asked[0] == ("/b?x=1", host, "Basic " + base64.b64encode(b"me:pass word").decode())


SECRET = "s3cr3t"


@pytest.mark.parametrize(("source", "shown"), [
    (f"http://me:{SECRET}@localhost:PORT/a.png?sig={SECRET}#{SECRET}", "'http://localhost:PORT/a.png'"),
    (f"http://{SECRET}@127.0.0.1:PORT/missing?sig={SECRET}", "'http://127.0.0.1:PORT/missing'"),
    (f"http://me:{SECRET}/@127.0.0.1:PORT/x?sig={SECRET}", "'http://127.0.0.1:PORT/x'"),
    (f"HTTP://me:{SECRET}@127.0.0.1:9/x?sig={SECRET}", "'HTTP://127.0.0.1:9/x'"),
    (f"http://127.0.0.1:PORT/a b?sig={SECRET}", "'http://127.0.0.1:PORT/a%20b'"),
    (f"http://127.0.0.1:PORT/to?http://me:{SECRET}@localhost:PORT/y?{SECRET}", "'http://localhost:PORT/y'"),
    (f"http://127.0.0.1:PORT/to?ftp://me:{SECRET}@localhost:PORT/y?{SECRET}", "'ftp://localhost:PORT/y'"),
    (f"http://127.0.0.1:PORT/to?file://me:{SECRET}@localhost/y?{SECRET}", "'http://127.0.0.1:PORT/to'"),
    (f"s3://me:{SECRET}@bucket/a.png?sig={SECRET}", "'s3://bucket/a.png'"),
    ({"bytes": None, "path": f"https://me:{SECRET}@x.org/a.png?sig={SECRET}"}, "'https://x.org/a.png'"),
    (f"http://127.0.0.1:PORT/none?{SECRET}", "'http://127.0.0.1:PORT/none': the image cannot be read"),
    ("text.png", "'text.png': the image cannot be read: it is none of JPEG"),
    ({"bytes": None, "path": "text.png"}, "'text.png': the image cannot be read: it is none of JPEG"),
    (Path("text.png"), "'text.png': the image cannot be read: it is none of JPEG"),
    (b"text", "the image cannot be read"),
], ids=lambda _: "")  # fmt: skip
def test_an_error_names_the_path_or_url_without_its_secrets(llm, pages, site, source, shown):
    (pages / "text.png").write_bytes(b"text")
    port = site.rpartition(":")[2]
    source = source.replace("PORT", port) if isinstance(source, str) else source
    for given in ([source], [PAGE, source]):
        (output,) = run(llm, asks(*given, text=ONE * len(given)), THREE)
        why = why_of(output)
        assert shown.replace("PORT", port) in why and SECRET not in why, why
    with refuses("the image"):
        llm.add_request(asks(source), THREE)


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


def test_a_size_takes_the_place_of_other_bounds(path, tmp_path):
    """The file's bounds, or the engine's, replaced it, as in Qwen2.5-VL; and a request's bounds changed the engine's.

    Processors write such bounds into the dictionary that they are given.
    """
    shutil.copytree(path, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "preprocessor_config.json"
    with_bounds = json.loads(file.read_text()) | {"min_pixels": 64, "max_pixels": 2560}
    file.write_text(json.dumps(with_bounds))
    size, page = {"shortest_edge": 64, "longest_edge": 1000}, image(90, 90, 3)

    def count(llm, **options):
        (output,) = run(llm, asks(page, mm_processor_kwargs=options), THREE)
        return output.prompt_token_ids.count(IMAGE)

    with engine(str(tmp_path), mm_processor_kwargs={"max_pixels": 2000}) as llm:
        assert [count(llm), count(llm, size=size), count(llm, size=size, max_pixels=300)] == [25, 9, 4]
    with engine(str(tmp_path), mm_processor_kwargs={"size": size}) as llm:
        assert [count(llm), count(llm, max_pixels=300), count(llm)] == [9, 4, 9]
    assert size == {"shortest_edge": 64, "longest_edge": 1000}


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
    """Of 1,000 pages, 100 of which have a million pixels: 300 MB when they are decoded.

    ``run`` kept the requests of the lot that it had queued last, finished or not: here 488 of the pages.
    """
    alive, most = weakref.WeakSet(), []
    original = loading.Image.__init__

    def init(self, *args):
        original(self, *args)
        alive.add(self)
        most.append(len(alive))

    monkeypatch.setattr(loading.Image, "__init__", init)
    big, small = (encoded(image(side, side, 6), "JPEG") for side in (1000, 16))
    prompts = [asks(big if i % 10 == 0 else small, text=f"{i} {ONE}") for i in range(1000)]
    run(llm, prompts[:100], greedy(1))
    before, most[:] = resident(), []
    outputs = run(llm, prompts, greedy(1))
    grown = resident() - before
    assert {output["finish_reason"] for output in outputs} == {"length"} and len(most) == 1000
    assert max(most) < 100 and grown < 160 << 20, (max(most), grown)
    list(llm.stream(prompts[:8], greedy(1)))
    assert llm.submit(prompts[0], greedy(1)).result()["finish_reason"] == "length"
    gc.collect()
    assert not alive and llm._inputs.attachments.num_bytes == 0


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
