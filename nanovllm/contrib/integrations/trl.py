"""Rollouts for TRL's ``GRPOTrainer``, by its seam for other engines: ``rollout_func`` (experimental there).

    llm = LLM("Qwen/Qwen3-0.6B", gpu_memory_utilization=0.4)
    GRPOTrainer(model="Qwen/Qwen3-0.6B", ..., rollout_func=rollout_func(llm)).train()

Owns when the trainer's weights are pushed: before the first rollout and after each step of the optimizer.
"""

from collections.abc import Callable
from typing import Any

from nanovllm import LLM, ConfigError, SamplingParams


def rollout_func(llm: LLM, sleep_level: int | None = None) -> Callable[[list, Any], dict[str, list]]:
    """Make the function for ``GRPOTrainer(rollout_func=...)``.

    Args:
        llm: an engine of the model that is trained, with ``logprobs_mode="processed_logprobs"`` if the trainer's
            temperature is not 1. Prompts longer than its ``max_model_len`` are refused.
        sleep_level: 1 or 2 gives the device's memory to the trainer between rollouts, see ``LLM.sleep``.

    Raises:
        ConfigError: a setting of the trainer cannot be honoured.
    """
    pushed: tuple[Any, int] = None, -1  # the trainer's state and its step, whose weights the engine has

    def rollout(prompts: list, trainer: Any) -> dict[str, list]:
        nonlocal pushed
        args, model = trainer.args, trainer.accelerator.unwrap_model(trainer.model)
        if getattr(trainer, "tools", None) or hasattr(model, "merge_adapter"):
            raise ConfigError("rollout_func: tools and adapters (PEFT) of the trainer are not supported.")
        if args.temperature != 1 and llm.config.logprobs_mode != "processed_logprobs":
            raise ConfigError(
                f"rollout_func: at temperature={args.temperature} the trainer's log-probabilities are those of "
                'LLM(logprobs_mode="processed_logprobs").'
            )
        llm.wake_up(["weights"])
        state, step = pushed
        # another call of ``train`` has another state, whose steps begin at 0 again
        if state is not trainer.state or step != trainer.state.global_step or sleep_level == 2:
            llm.update_weights(model.named_parameters())
            pushed = trainer.state, trainer.state.global_step
        llm.wake_up()
        given = {name: getattr(args, name) for name in ("temperature", "top_p", "top_k", "repetition_penalty")}
        given |= {"min_p": args.min_p or 0.0, "max_tokens": args.max_completion_length, "logprobs": 0}
        params = SamplingParams(**{**given, **(args.generation_kwargs or {})})
        if isinstance(prompts[0], str):
            outputs = llm.generate(prompts, params, use_tqdm=False)
        else:
            outputs = llm.chat(prompts, params, False, chat_template_kwargs=args.chat_template_kwargs,
                               continue_final_message=prompts[0][-1]["role"] == "assistant")  # fmt: skip
        if sleep_level is not None:
            llm.sleep(sleep_level)
        completions: list[Any] = [output.outputs[0] for output in outputs]
        return {
            "prompt_ids": [output.prompt_token_ids for output in outputs],
            "completion_ids": [c.token_ids for c in completions],
            "logprobs": [[at[i].logprob for at, i in zip(c.logprobs, c.token_ids, strict=True)] for c in completions],
        }

    return rollout
