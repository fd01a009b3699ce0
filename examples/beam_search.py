# /// script
# requires-python = ">=3.10"
# dependencies = ["nanovllm"]
# tool.uv.sources.nanovllm = { path = "..", editable = true }
# ///
"""The most probable completions as a whole, which greedy decoding, token by token, may miss."""

from nanovllm import LLM, BeamSearchParams

with LLM() as llm:
    (output,) = llm.beam_search(["count from 3 to 6"], BeamSearchParams(beam_width=4, max_tokens=16))
    for sequence in output.sequences:
        print(f"{sequence.cum_logprob:8.3f}  {sequence.text!r}")
