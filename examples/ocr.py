# /// script
# requires-python = ">=3.10"
# dependencies = ["nanovllm", "pillow>=10", "transformers>=5.17"]
# tool.uv.sources.nanovllm = { path = "..", editable = true }
# ///
"""Text of page images in a directory, a window of them in memory; the engine decodes the next while the GPU works.

    python examples/ocr.py Qwen/Qwen3-VL-8B-Instruct pages

One output for each page, as it is finished. A page that cannot be read is an error of its own.
"""

import sys
from pathlib import Path

from nanovllm import LLM, SamplingParams

model, directory = sys.argv[1:]
INSTRUCTION = "Transcribe this page as Markdown. Answer with the text alone."
SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".tif", ".tiff"}
pages = sorted(path for path in Path(directory).iterdir() if path.suffix.lower() in SUFFIXES)


def prompts(llm):
    for page in pages:
        # bytes, a PIL image or an array would do, too; here the engine's threads open the file
        parts = [{"type": "image", "path": page.name}, {"type": "text", "text": INSTRUCTION}]
        yield from llm.chat_prompts([[{"role": "user", "content": parts}]])


with LLM(model, max_model_len=8192, allowed_local_media_path=directory) as llm:
    for output in llm.stream(prompts(llm), SamplingParams(temperature=0, max_tokens=2048)):
        completion = output.outputs[0]
        print(f"==== {pages[output.index].name}")
        print(completion.text if completion.finish_reason != "error" else f"error: {completion.stop_reason}")
