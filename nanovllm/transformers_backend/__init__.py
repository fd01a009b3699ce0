"""Decoders that have no row in ``MODELS``: transformers' modules around this library's attention and linear layers.

    config.py     ``config.json`` as a ``ModelConfig``, by transformers' own reader; imports no torch
    interface.py  transformers' registry of attention functions, and the recorder that finds the calls of a model
    build.py      the modules: on meta first, those exchanged whose numbers agree
    layers.py     this library's layers, MLPs, experts and norms, as they take the place of transformers' modules
    rotation.py   rotary embedding in one kernel
    names.py      checkpoint names, by transformers' own rules of renaming
    model.py      ``TransformersCausalLM``, the counterpart of ``models.decoder.CausalLM``
    proof.py      a start's comparison with transformers' own numbers; a model that differs is refused
"""
