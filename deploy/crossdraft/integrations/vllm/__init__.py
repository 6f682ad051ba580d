"""Drafters for stock vLLM: `RemoteDrafter` is a proposer for vLLM's `custom_class` that asks crossdraft's services.

It needs no vLLM to be imported, and adds nothing to it: drafts are text, and vLLM's own sampler verifies them.
"""

from crossdraft.integrations.vllm.interface import RemoteDrafter as RemoteDrafter
