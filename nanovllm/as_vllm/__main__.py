import sys

from nanovllm.contrib.as_vllm.__main__ import main

main(sys.argv[1:])
