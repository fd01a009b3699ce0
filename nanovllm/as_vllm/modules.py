from nanovllm.contrib.as_vllm.modules import install as install
