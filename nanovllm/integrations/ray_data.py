from nanovllm.contrib.integrations.ray_data import *  # noqa: F403
