"""Public name of ``nanovllm.contrib.integrations.lm_eval``; as a program, the harness's own command line."""

from nanovllm.contrib.integrations.lm_eval import NanoVLLM as NanoVLLM

if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
