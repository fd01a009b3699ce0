"""Public name of ``nanovllm.contrib.integrations.engine_thread``."""

from nanovllm.contrib.integrations.engine_thread import EngineThread as EngineThread
