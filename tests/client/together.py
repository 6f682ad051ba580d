"""Outputs to their end."""

from crossdraft.client import Generation


async def ended(generation: Generation) -> Generation:
    """The output, once all its tokens have come."""
    async for _ in generation:
        pass
    return generation
