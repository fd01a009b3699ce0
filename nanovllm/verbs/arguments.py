"""Unknown keywords raise an error that lists the method's keywords and says where a request's parameters go."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from nanovllm.errors import RequestError
from nanovllm.sampling_params import keyword_hint
from nanovllm.validation import did_you_mean

C = TypeVar("C", bound=type)


def refuses_unknown_keywords(cls: C) -> C:
    """Decorate a class: its public methods with arguments, inherited ones too, reject other keywords by name."""
    for name, method in inspect.getmembers(cls, inspect.isfunction):
        parameters = list(inspect.signature(method).parameters.values())
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        if name[0] != "_" and len(parameters) > 1 and not takes_all and parameters[0].name == "self":
            setattr(cls, name, _checked(method, [parameter.name for parameter in parameters[1:]]))
    return cls


def _checked(method: Callable[..., Any], known: list[str]) -> Callable[..., Any]:
    @functools.wraps(method)
    def checked(*args: Any, **keywords: Any) -> Any:
        for name, value in keywords.items():
            if name not in known:
                makes_requests = "sampling_params" in known
                hint = keyword_hint(name, known, f"{value!r:.50}") if makes_requests else did_you_mean(name, known)
                verb, arguments = method.__name__, ", ".join(known)
                raise RequestError(f"{verb}() has no argument {name!r}.{hint} Arguments: {arguments}.")
        return method(*args, **keywords)

    return checked
