"""Public name of ``nanovllm.contrib.integrations.ray_data``."""

from nanovllm.contrib.integrations.ray_data import *  # noqa: F403
