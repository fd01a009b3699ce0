"""The methods of ``LLM`` beside ``generate``, a mixin per subject. Nothing below imports one."""
