from nanovllm.contrib.integrations.lm_eval import NanoVLLM as NanoVLLM

if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
