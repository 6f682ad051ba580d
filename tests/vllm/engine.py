"""Run by the Python of an environment with vLLM: reads a job from stdin, and writes what an engine did to a file.

A job is a JSON object: `model`, `speculative` (vLLM's speculative_config, or null), `engine` (further arguments of
LLM), and `runs`, each of `prompts`, how many of them are `at_once`, and `sampling` (arguments of SamplingParams).
"""

import json
import sys
from typing import Any

from vllm import LLM, SamplingParams


def run(llm: Any, work: dict[str, Any]) -> list[dict[str, Any]]:
    """The outputs, in the order of the prompts; with several of each prompt, one after another."""
    sampling, prompts, at_once = SamplingParams(**work["sampling"]), work["prompts"], work["at_once"]
    found = []
    for first in range(0, len(prompts), at_once):
        for answer in llm.generate(prompts[first : first + at_once], sampling, use_tqdm=False):
            for output in answer.outputs:
                likely = [
                    sorted((one.logprob for one in step.values()), reverse=True) for step in output.logprobs or ()
                ]
                found.append({"text": output.text, "ids": list(output.token_ids), "likely": likely})
    return found


def main() -> None:
    job = json.load(sys.stdin)
    llm = LLM(
        model=job["model"],
        dtype="float32",
        enforce_eager=True,
        disable_log_stats=False,
        speculative_config=job["speculative"],
        **job["engine"],
    )
    runs = [run(llm, work) for work in job["runs"]]
    counts = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        json.dump({"runs": runs, "counts": counts}, file)


if __name__ == "__main__":
    main()
