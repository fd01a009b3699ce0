"""Images in batch jobs, in Ray Data and under vLLM's names; the oracle is ``LLM``."""

import asyncio
import base64
import csv
import io
import json
from importlib.util import find_spec

import numpy as np
import pytest
import vision_families
from helpers import ROOT, greedy, refuses, run, run_python, tokens_of
from PIL import Image
from vision_families import image

from nanovllm import LLM, ConfigError
from nanovllm.cli import main
from nanovllm.contrib.as_vllm import modules, options
from nanovllm.contrib.as_vllm.llm import LLM as StandIn
from nanovllm.contrib.jobs.rows import images_of, with_images

PAGE = image(40, 24, 1)
READ = {"type": "text", "text": "Read it."}
OPTIONS = {"device": "cpu", "kvcache_block_size": 16, "num_kvcache_blocks": 100, "max_model_len": 600}
FLAGS = [text for name, value in OPTIONS.items() for text in (f"--{name.replace('_', '-')}", str(value))]


def says(*parts):
    return [{"role": "user", "content": [*parts]}]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    vision_families.make_checkpoint("qwen3_vl", path)
    vision_families.add_tokenizer(path)
    return str(path)


@pytest.fixture
def folder(tmp_path):
    """With a page in a folder of its own, and a link that leads out; and PNG and data URL of the page."""
    folder = tmp_path / "in"
    (folder / "pages").mkdir(parents=True)
    for to in (folder / "pages" / "a.png", tmp_path / "out.png"):
        PAGE.save(to)
    (folder / "link.png").symlink_to(tmp_path / "out.png")
    return folder


@pytest.fixture(scope="module")
def png():
    buffer = io.BytesIO()
    PAGE.save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture(scope="module")
def url(png):
    return "data:image/png;base64," + base64.b64encode(png).decode()


@pytest.fixture(scope="module")
def expected(path):
    """Text for the page before "Read it.", for two pages, and for the text alone."""
    with LLM(path, **OPTIONS, quiet=True) as llm:
        parts = [{"type": "image", "image": PAGE}] * 2
        given = [says(*parts[:n], READ) for n in (1, 2)] + [[{"role": "user", "content": "Read it."}]]
        return [output["text"] for output in llm.chat(given, greedy(3), use_tqdm=False)]


def batch(folder, source, path, *more):
    """Records by their ids, and the exit status."""
    sampling = "--temperature", "0", "--max-tokens", "3", "--ignore-eos", "--prompt", "Read it.", "--chat"
    out = folder.parent / f"{source.name}.out.jsonl"
    status = main(["batch", str(source), str(out), "--model", path, *FLAGS, *sampling, *more])
    records = [json.loads(line) for line in out.read_text().splitlines()]
    return {record["custom_id"]: record for record in records}, status


def test_a_job_with_images(folder, path, url, expected):
    """A row whose image is bad, or not allowed, is an error row; also in OpenAI's lines."""
    one, two, none = expected

    def line(url):
        content = says({"type": "image_url", "image_url": {"url": url}}, READ)
        return {"url": "/v1/chat/completions", "body": {"messages": content, "max_tokens": 3}}

    rows = {
        "path": ({"image": "pages/a.png"}, one), "url": ({"images": [url]}, one),
        "two": ({"images": ["pages/a.png", url]}, two), "own": ({"image": "pages/a.png", "prompt": "Read it."}, one),
        "hub": ({"image": {"bytes": None, "path": "pages/a.png"}}, one), "none": ({"prompt": "Read it."}, none),
        "empty": ({"images": []}, "has no image in 'images' or 'image'"), "line": (line(url), one),
        "line of a path": (line("pages/a.png"), one),
        "places": ({"images": ["pages/a.png"], "messages": says({"type": "image"}, READ)}, one),
        "nulls": ({"images": ["pages/a.png"], "messages": says(
            {"type": "image", "index": 0, "text": None}, {"index": None, **READ, "image": None})}, one),
        "..": ({"image": "../out.png"}, "lies outside"), "link": ({"image": "link.png"}, "lies outside"),
        "line of a link": (line("link.png"), "lies outside"), "bad": ({"image": url[:-88]}, "cannot be read"),
        "host": ({"image": "http://127.0.0.1:9/a.png"}, "must name its host '127.0.0.1'"),
        "few": ({"images": [url, url], "messages": says({"type": "image"}, READ)}, "has 2 images, and its messages"),
        "many": ({"images": [url] * 3}, "allows 2"), "null": ({"image": None}, "has no image in"),
        "missing": ({}, "has no image in"), "null place": ({"messages": says({"type": "image"}, READ)}, "'image' must"),
        "null part": ({"messages": says({"type": "image", "image": None}, READ)}, "'image' must"),
        "mixed": ({"prompt": "Read it.", "image": None}, none),
    }  # fmt: skip
    source = folder / "rows.jsonl"
    source.write_text("".join(json.dumps({"custom_id": key, **row}) + "\n" for key, (row, _) in rows.items()))
    limit = "--limit-mm-per-prompt", '{"image": 2}'
    found, status = batch(folder, source, path, *limit)
    assert status == 3
    for key, (_, text) in rows.items():
        record = found[key]
        if record["error"] is not None:
            assert text in record["error"]["message"], (key, record)
        else:
            body = (record.get("response") or {}).get("body")
            assert text == (body["choices"][0]["message"]["content"] if body else record["text"]), key
    again = batch(folder, source, path, *limit, "--retry-errors", "--allowed-media-domains", '["127.0.0.1"]')[0]
    assert "cannot be fetched" in again["host"]["error"]["message"]


def test_a_job_keeps_the_secrets_of_urls(folder, path, capfd):
    """They stood in OUT and on stderr: of a URL that cannot be fetched, and of a row or a part that is refused."""
    secret = "http://me:s3cr3t@127.0.0.1:9/a.png?sig=s3cr3t"
    part = {"type": "image_url", "image_url": {"url": secret}}
    rows = [{"image": secret}, {"image": {"path": secret}}, {"messages": says(part, READ)}, {"messages": secret},
            {"messages": json.dumps([secret])}, {"messages": says({**part, "image_url": 3, "type": secret})},
            {"body": secret}, {"body": {"messages": says(part, READ), "logit_bias": secret}}, {"id": [secret]},
            {"image": secret.replace("http", "s3")}, secret]  # fmt: skip
    source = folder / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found, status = batch(folder, source, path, "--metrics", str(folder / "metrics.jsonl"),
                          "--allowed-media-domains", '["127.0.0.1"]')  # fmt: skip
    assert status == 3 and len(found) == len(rows) and all(record["error"] for record in found.values())
    assert "the image 'http://127.0.0.1:9/a.png' cannot be fetched" in found["row-0"]["error"]["message"]
    assert main(["batch", secret, str(folder / "x.jsonl")]) == 1  # IN is a URL
    texts = [capfd.readouterr().err, *(file.read_text() for file in folder.parent.rglob("*.json*") if file != source)]
    assert len(texts) > 3 and not any("s3cr3t" in text for text in texts), texts


def test_a_job_of_parquet_or_csv(folder, path, png, url, expected):
    one, two, _ = expected
    with (folder / "rows.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["id", "image"], ["a", "pages/a.png"], ["b", json.dumps(["pages/a.png", url])]])
    found, status = batch(folder, folder / "rows.csv", path)
    assert status == 0 and [found[key]["text"] for key in "ab"] == [one, two]
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    page = {"bytes": png, "path": "a.png"}
    table = pa.table({"id": ["a", "b"], "images": [[page], [page, {"bytes": None, "path": "pages/a.png"}]]})
    pyarrow.parquet.write_table(table, folder / "rows.parquet")
    found, status = batch(folder, folder / "rows.parquet", path)
    assert status == 0 and [found[key]["text"] for key in "ab"] == [one, two]


def test_a_directory_may_be_named(folder, path, expected):
    source = folder / "rows.jsonl"
    source.write_text('{"id": "a", "image": "out.png"}\n{"id": "b", "image": "in/link.png"}\n')
    found, status = batch(folder, source, path, "--allowed-local-media-path", str(folder.parent))
    assert status == 0 and [found[key]["text"] for key in "ab"] == expected[:1] * 2


def test_the_example_reads_pages(folder, path):
    """examples/ocr.py: folders, images and PDFs. A page that cannot be read is an error of its own, with its name; an
    answer that is cut says so.
    """
    pages = folder / "pages"
    (pages / "b.png").write_bytes(b"no image")
    PAGE.copy().save(pages / "c.pdf", save_all=True, append_images=[PAGE.rotate(90)], resolution=200)
    secret = {"Root": "2 0 R", "Encrypt": f"<</Filter/Standard/V 1/R 2/P -4/O<{'00' * 32}>/U<{'11' * 32}>>>",
              "ID": f"[<{'22' * 16}><{'22' * 16}>]", "Size": "4"}  # fmt: skip
    trailer = "".join(f"/{name} {value}" for name, value in secret.items())
    (folder / "secret.pdf").write_text(
        "%PDF-1.4\n2 0 obj<</Type/Catalog/Pages 3 0 R>>endobj\n3 0 obj<</Type/Pages/Count 0/Kids[]>>endobj\n"
        f"trailer<<{trailer}>>\n%%EOF\n"
    )
    script = (ROOT / "examples" / "ocr.py").read_text().replace("8192", "600").replace("2048", "64")
    (folder / "ocr.py").write_text(script)
    out = run_python(folder / "ocr.py", path, pages, folder / "secret.pdf", folder / "none.png").stdout
    found = dict(part.split("\n", 1) for part in out.split("==== ")[1:] if not part.startswith("cut: "))
    name = str(pages / "c.pdf")
    first, second = f"{name}, page 1 of 2", f"{name}, page 2 of 2"
    has_pdf = find_spec("pypdfium2") is not None
    read = [str(pages / "a.png"), *([first, second] if has_pdf else [])]
    others = [str(pages / "b.png"), str(folder / "secret.pdf"), str(folder / "none.png"), *([] if has_pdf else [name])]
    assert {*found} == {*read, *others}
    assert all(not found[each].startswith("error") for each in read)
    assert out.count("==== cut: the page has more text than max_tokens=64") == len(read)  # random weights never stop
    assert found[others[0]].startswith("error: the image cannot be read")
    assert ("password" if has_pdf else "pip install '.[pdf]'") in found[others[1]]
    assert "No such file" in found[others[2]]
    for given, why in (([], "required: model, paths"), ([path, folder / "none"], "no .jpeg, .jpg, .pdf, .png")):
        (folder / "none").mkdir(exist_ok=True)
        done = run_python(folder / "ocr.py", *given, check=False)
        assert done.returncode == 2 and why in done.stderr and "Traceback" not in done.stderr


def test_images_of_rows():
    array = np.zeros((2, 2, 3), np.uint8)
    forms = ("", []), (None, []), ("a", ["a"]), (["a", "b"], ["a", "b"]), (array, [array]), (b"a", [b"a"])
    for given, images in forms:
        assert images_of({"image": given}) == images
    assert images_of({"images": ["a"], "image": "b"}) == ["a"]
    assert images_of({"images": [], "image": "a"}) == ["a"]
    for nothing in (float("nan"), {"bytes": None, "path": None}, {}, [None], ["a", ""], [float("nan")]):
        with refuses("the row's 'image' holds no image, but "):
            images_of({"image": nothing})
    place = {"type": "image", "index": 0, "text": None, "image": None}
    (message,) = with_images([{"role": "user", "content": [{"type": "text", "text": "u"}, place]}], ["a"])
    assert message["content"] == [{"type": "text", "text": "u"}, {"type": "image", "image": "a"}]
    (message,) = with_images([{"role": "user", "content": None}], ["a"])
    assert message["content"] == [{"type": "image", "image": "a"}]
    with refuses("the text in 'image' is not JSON"):
        images_of({"image": "[a"})
    system, user = {"role": "system", "content": "s"}, {"role": "user", "content": "u"}
    first, second = with_images([system, user], ["a"])
    assert first == system and user["content"] == "u"
    assert second["content"] == [{"type": "image", "image": "a"}, {"type": "text", "text": "u"}]


@pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray Data: pip install '.[ray]'")
def test_rows_of_ray_data(path, png, expected):
    import pyarrow as pa

    from nanovllm.contrib.integrations.ray_data import ERROR, Engine

    engine = Engine(path, OPTIONS, continue_on_error=True)
    params = {"temperature": 0, "max_tokens": 3, "ignore_eos": True}
    part = {"type": "image", "text": None, "image": png}, {"type": "text", "text": "Read it.", "image": None}
    place = {"type": "image", "text": None, "image": None}, part[1]
    rows = [
        {"messages": says(*part)}, {"messages": says(*place), "image": {"bytes": png, "path": None}},
        {"messages": says(part[1]), "image": {"bytes": png, "path": None}}, {"messages": says(part[1])},
        {"messages": says(part[1]), "image": {"bytes": b"x", "path": None}},
        {"prompt": "<|image_pad|>Read", "image": {"bytes": png, "path": None}},
        {"prompt": "<|image_pad|>Read"}, {"messages": says(*place)},
        {"messages": says(part[1]), "image": {"bytes": None, "path": None}},
    ]  # fmt: skip
    table = pa.Table.from_pylist([{"sampling_params": params, "image": None, "prompt": None, **row} for row in rows])
    done = asyncio.run(engine(table)).to_pylist()
    one, _, none = expected
    assert [row["generated_text"] for row in done[:5]] == [one, one, one, none, None]
    assert [row[ERROR][:27] for row in done] == [
        "", "", "", "", "the image cannot be read: i", "", "the prompt has 1 image plac", "a part of type 'image' must",
        "the row's 'image' holds no ",
    ]  # fmt: skip


def test_names_of_vllm(path, folder, png, url, expected):
    one, two, _ = expected
    given = {"limit_mm_per_prompt": {"image": {"count": 2, "width": 9}, "video": 0}, "max_model_len": 600,
             "mm_processor_kwargs": {"min_pixels": 64, "max_pixels": 2048, "fps": 1, "use_fast": True}, "device": "cpu",
             "dtype": "float32", "allowed_local_media_path": str(folder), "num_gpu_blocks_override": 100}  # fmt: skip
    llm, params = StandIn(path, **given), greedy(3)
    try:
        part = {"type": "image_url", "image_url": {"url": url}}
        outputs = llm.chat([says(part, READ), says(part, part, READ)], params, use_tqdm=False)
        assert [output["text"] for output in outputs] == [one, two]
        prompt = {"prompt": outputs[0].prompt, "multi_modal_data": {"image": PAGE}, "multi_modal_uuids": {"image": "x"}}
        assert tokens_of(run(llm, prompt, params)) == tokens_of(outputs[:1])
        llm.add_request("a", prompt, params)
        llm.add_request("b", {"prompt": outputs[0].prompt, "multi_modal_data": {"image": b"x"}}, params)
        last = {}
        while llm.has_unfinished_requests():
            last |= {output.request_id: output for output in llm.step()}
        assert last["a"]["text"] == one and last["b"]["finish_reason"] == "error"
        good, closed = (says({"image_url": x}, {"text": "Read it."}) for x in (
            (folder / "pages" / "a.png").as_uri(), "http://127.0.0.1:9/a.png"))  # fmt: skip
        assert llm.chat(good, params, use_tqdm=False)[0]["text"] == one
        with refuses("conversation 1: the image 'http://127.0.0.1:9/a.png' cannot be fetched"):  # every host is allowed
            llm.chat([good, closed], params, use_tqdm=False)
        assert not llm.has_unfinished_requests()
        lists = "{% for m in messages %}{% for p in m.content %}({{ p.text }}){% endfor %}{% endfor %}"
        hi = [{"role": "user", "content": "hi"}]
        for form, text in (("auto", "(hi)"), ("openai", "(hi)"), ("string", "()()")):
            asked = {"chat_template": lists, "chat_template_content_format": form}
            assert llm.chat(hi, params, use_tqdm=False, **asked)[0].prompt == text
            llm.enqueue_chat(hi, params, **asked)
            assert llm.wait_for_completion(use_tqdm=False)[0].prompt == text
        with refuses("3 images; LLM(limit_mm_per_prompt={'image': 2}) allows 2."):
            llm.chat(says(part, part, part, READ), params)
    finally:
        llm.shutdown()
    for name in ("multimodal", "multimodal.utils", "multimodal.image", "multimodal.inputs"):
        assert f"vllm.{name}" in modules.MODULES
    assert modules.resolve("fetch_image")(str(folder / "pages" / "a.png")).tobytes() == PAGE.tobytes()
    assert modules.resolve("MultiModalDataDict") is dict
    clear = Image.fromarray(np.array([[[200, 0, 0, 255], [0, 0, 0, 0], [0, 0, 0, 128]]], np.uint8))
    convert, rescale = map(modules.resolve, ("convert_image_mode", "rescale_image_size"))
    assert np.array(convert(clear, "RGB")).tolist() == [[[200, 0, 0], [255] * 3, [127] * 3]]
    assert convert(PAGE, "RGB") is PAGE and convert(PAGE, "L").mode == "L" and convert(clear, "LA").mode == "LA"
    assert rescale(PAGE, 0.3).size == tuple(int(0.3 * side) for side in PAGE.size)
    turned = rescale(PAGE, 1.0, transpose=Image.Transpose.ROTATE_90)
    assert turned.tobytes() == PAGE.rotate(90, expand=True).tobytes()
    one_host = {"model": path, "allowed_media_domains": ["x.org"]}
    assert options.to_nanovllm(one_host)["allowed_media_domains"] == ["x.org"]
    with refuses("mm_processor_kwargs: the image processor has no option 'num_crops'.", ConfigError):
        StandIn(path, **{**given, "mm_processor_kwargs": {"num_crops": 4}})


def test_a_benchmark_of_a_whole_job(tmp_path, monkeypatch, capsys):
    """Two pages of 160 x 212 pixels, from the start of the process; with a tiny Qwen2.5-VL."""
    from benchmarks import batch_job
    from benchmarks.workloads import VISION

    published = VISION["qwen2.5-vl-7b"]
    text = {"hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 1}  # fmt: skip
    tower = {"depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 256,
             "fullatt_block_indexes": [1]}  # fmt: skip
    tiny = {"text_config": published["text_config"] | text, "vision_config": published["vision_config"] | tower}
    monkeypatch.setitem(VISION, "tiny", published | tiny)
    batch_job.write_checkpoint(tmp_path / "model", "tiny")
    capsys.readouterr()
    batch_job.main(["pages", "--model", str(tmp_path / "model"), "--jobs", "2:cold", "--scale", "8", "--longest", "3"])
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])["2 pages, cold kernels"]
    assert figures["complete_rows"] == 2 and 0 < figures["last_row_s"] <= figures["wall_s"] + 0.1
    assert figures["pages_per_s"] == pytest.approx(2 / figures["last_row_s"], rel=0.1)
    with pytest.raises(SystemExit, match=r"nanovllm batch .* failed:\n.*No such file"):
        batch_job.timed(batch_job.command(tmp_path / "none.jsonl", tmp_path / "out.jsonl"))
