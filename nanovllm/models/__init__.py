"""Model classes by the architecture name in ``config.json``; a class is imported when it is asked for."""

from importlib import import_module

MODELS = {
    "Qwen3ForCausalLM": "nanovllm.models.decoder",
}


def get_model_class(architecture: str) -> type:
    return getattr(import_module(MODELS[architecture]), architecture)
