# /// script
# requires-python = ">=3.10"
# dependencies = ["nanovllm"]
# tool.uv.sources.nanovllm = { path = ".", editable = true }
# ///
"""Answers prompts with a chat model: ``python example.py [--model M] [prompt ...]``."""

import argparse

PROMPTS = ["introduce yourself", "list all prime numbers within 100"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Answer prompts with a chat model.")
    parser.add_argument("prompts", nargs="*", metavar="prompt", default=PROMPTS, help=f"default: {PROMPTS}")
    parser.add_argument("--model", help="directory or hub id, e.g. Qwen/Qwen3-0.6B; default: the bundled demo model")
    parser.add_argument("--device", default="auto", choices=["auto", "cuda", "cpu"])
    parser.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N")
    parser.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs: starts sooner, runs slower")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, help="default: 0 (greedy) for the demo model, otherwise 0.6")
    args = parser.parse_args()

    from nanovllm import LLM, SamplingParams

    temperature = args.temperature if args.temperature is not None else 0.6 if args.model else 0.0
    sampling_params = SamplingParams(temperature=temperature, max_tokens=args.max_tokens)
    conversations = [[{"role": "user", "content": prompt}] for prompt in args.prompts]
    with LLM(
        args.model,
        device=args.device,
        tensor_parallel_size=args.tensor_parallel_size,
        enforce_eager=args.enforce_eager,
    ) as llm:
        outputs = llm.chat(conversations, sampling_params)

    for prompt, output in zip(args.prompts, outputs, strict=True):
        print(f"\nPrompt:     {prompt}\nCompletion: {output['text']}")


if __name__ == "__main__":
    main()
