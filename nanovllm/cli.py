from nanovllm.contrib.cli import main as main
