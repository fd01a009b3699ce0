# /// script
# requires-python = ">=3.10"
# dependencies = ["nanovllm", "pillow>=10", "transformers>=5.17", "pypdfium2>=5"]
# tool.uv.sources.nanovllm = { path = "..", editable = true }
# ///
"""Text of pages: images and PDFs, one by one or in a folder. A window of them is in memory; PDFs need '.[pdf]'.

    python examples/ocr.py Qwen/Qwen3-VL-8B-Instruct scans report.pdf

One output for each page, as it is finished. A page or a file that cannot be read is an error of its own.
"""

import argparse
from pathlib import Path

from nanovllm import LLM, SamplingParams

INSTRUCTION = "Transcribe this page as Markdown. Answer with the text alone."
SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".tif", ".tiff", ".pdf"}
DPI, MAX_PIXELS = 200, 80_000_000  # of a page of a PDF; a poster gets fewer dots per inch
MAX_TOKENS = 2048


def pages(file):
    """Name and image of each page of a file; an exception in place of an image that cannot be read."""
    try:
        if file.suffix.lower() != ".pdf":
            yield str(file), file.read_bytes()
            return
        import pypdfium2

        with pypdfium2.PdfDocument(file) as pdf:
            for number in range(len(pdf)):
                name = f"{file}, page {number + 1} of {len(pdf)}"
                try:
                    page = pdf[number]
                    width, height = page.get_size()  # points of 1/72 inch
                    scale = min(DPI / 72, (MAX_PIXELS / (width * height)) ** 0.5)
                    yield name, page.render(scale=scale).to_pil().convert("RGB")
                except pypdfium2.PdfiumError as error:
                    yield name, error
    except ImportError:
        yield str(file), "PDFs need pypdfium2: pip install '.[pdf]'"
    except (OSError, RuntimeError) as error:  # pypdfium2's: damaged, or encrypted
        yield str(file), error


def prompts(llm, files, names):
    """A prompt for each page that can be read; its name is appended to ``names``."""
    for file in files:
        for name, image in pages(file):
            if isinstance(image, (str, Exception)):
                print(f"==== {name}\nerror: {image}")
                continue
            parts = [{"type": "image", "image": image}, {"type": "text", "text": INSTRUCTION}]
            names.append(name)
            yield from llm.chat_prompts([[{"role": "user", "content": parts}]])


def main():
    parser = argparse.ArgumentParser(description="Print the text of pages.")
    parser.add_argument("model", help="a vision language model: a directory or a hub id")
    parser.add_argument("paths", nargs="+", type=Path, help="images, PDFs, and folders that hold some")
    args = parser.parse_args()
    files = []
    for path in args.paths:
        inside = sorted(path.iterdir()) if path.is_dir() else []
        files += [file for file in inside if file.suffix.lower() in SUFFIXES] if path.is_dir() else [path]
    if not files:
        parser.error(f"no {', '.join(sorted(SUFFIXES))} in {', '.join(map(str, args.paths))}")
    names = []
    with LLM(args.model, max_model_len=8192) as llm:
        for output in llm.stream(prompts(llm, files, names), SamplingParams(temperature=0, max_tokens=MAX_TOKENS)):
            completion = output.outputs[0]
            print(f"==== {names[output.index]}")
            if completion.finish_reason == "error":
                print(f"error: {completion.stop_reason}")
                continue
            print(completion.text)
            if completion.finish_reason == "length":
                print(f"==== cut: the page has more text than max_tokens={MAX_TOKENS}")


if __name__ == "__main__":
    main()
