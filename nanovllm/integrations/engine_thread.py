from nanovllm.contrib.integrations.engine_thread import EngineThread as EngineThread
