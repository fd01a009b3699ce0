# /// script
# requires-python = ">=3.10"
# dependencies = ["nanovllm"]
# tool.uv.sources.nanovllm = { path = "..", editable = true }
# ///
"""Text as it is generated; then many prompts, each as it finishes."""

from nanovllm import LLM, SamplingParams

with LLM() as llm:
    for delta in llm.stream("introduce yourself", SamplingParams(temperature=0, max_tokens=60)):
        print(delta["text"], end="", flush=True)
    print()

    # prompts may be an endless generator: they are taken as there is room for them
    prompts = ((f"{i} + 3", SamplingParams(temperature=0, max_tokens=4 + i % 3)) for i in range(12))
    for output in llm.stream(prompts):
        print(f"prompt {output.index}: {output.prompt} = {output['text'].strip()}")
