"""Models, built from the shared layers. ``model_config.FAMILIES`` lists the supported architectures."""
