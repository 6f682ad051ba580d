"""Drafters that are not trusted: nothing that they say may change the distribution of the output."""

from dataclasses import replace

from crossdraft.pipeline.request import GenerationRequest, RequestError
from crossdraft.verification.methods import METHODS, default_method, method_named

SAFE = tuple(method.name for method in METHODS.values() if not method.trusting)


def without_trust(request: GenerationRequest) -> GenerationRequest:
    """The request with a method that needs no trust: the one asked for, or the default among them.

    Raises:
        RequestError: the method asked for needs it.
    """
    if request.method is None:
        default = default_method(request.options.temperature, seeded=True, same_vocabulary=False)
        return replace(request, method=default.name)
    if method_named(request.method).trusting:
        raise RequestError(
            f"with method {request.method!r} a drafter that lies about the laws that it drew from changes the output, "
            f"and this drafter is not trusted; use {' or '.join(map(repr, SAFE))}, or leave the method out",
            "method",
        )
    return request
