"""`crossdraft generate` and `crossdraft demo`: their options. What they need is imported when they run."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from crossdraft.cli.failures import Misused
from crossdraft.cli.method_names import METHODS
from crossdraft.cli.security import TlsCa, TlsCert, TlsKey, tls_of


class Overlaps(StrEnum):
    """Whether the drafter drafts on while the target verifies."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


Prompt = Annotated[str | None, typer.Argument(help="Text to continue; - reads standard input.")]
MaxTokens = Annotated[int, typer.Option(help="Longest output.")]


def generate(
    prompt: Prompt = None,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT,...", help="One or several of the same model; by default a bundled one is started."
        ),
    ] = None,
    drafter: Annotated[
        str | None, typer.Option(metavar="HOST:PORT,...", help="One or several, or none to decode plainly.")
    ] = None,
    method: Annotated[str | None, typer.Option(help=f"{', '.join(METHODS)}; by default the best.")] = None,
    k: Annotated[int, typer.Option("-k", help="Proposals in a lock-step round.")] = 5,
    max_tokens: MaxTokens = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Makes the output repeatable.")] = None,
    top_k: Annotated[int, typer.Option(help="0 is all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Above 0, at most 1.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Between 0 and 1.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="As in transformers.")] = 1.0,
    presence_penalty: Annotated[float, typer.Option(help="As in vLLM.")] = 0.0,
    logit_bias: Annotated[list[str] | None, typer.Option(metavar="ID:BIAS", help="Repeatable.")] = None,
    stop: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="Ends the output; repeatable.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end of sequence.")] = False,
    drafter_temperature: Annotated[float | None, typer.Option(help="By default the target's.")] = None,
    allow_inexact: Annotated[
        bool, typer.Option("--allow-inexact", help="Let a method change the distribution.")
    ] = False,
    audit: Annotated[bool, typer.Option("--audit", help="Recompute the drafter's draws from their rows.")] = False,
    overlap: Annotated[
        Overlaps, typer.Option(help="Draft on while the target verifies; off is the lock-step round of -k proposals.")
    ] = Overlaps.AUTO,
    window: Annotated[int | None, typer.Option(help="Most proposals ahead of what is verified.")] = None,
    wait: Annotated[int | None, typer.Option(help="Proposals that a pass waits for.")] = None,
    branches: Annotated[
        int | None, typer.Option(help="Proposals of each prepared continuation; 0 prepares none.")
    ] = None,
    branch_width: Annotated[int | None, typer.Option(help="Prepared continuations for each proposal.")] = None,
    paths: Annotated[int, typer.Option(help="Most guessed paths in a pass; 1 is a chain.")] = 2,
    speculation: Annotated[
        bool, typer.Option("--speculation", help="With two targets, begin passes before the one under way is back.")
    ] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Show what the governor decided, and why.")] = False,
    record: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a flight record, for replay and timeline.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object for each token, then the whole.")] = False,
    untrusted_drafter: Annotated[
        bool,
        typer.Option(
            "--untrusted-drafter", help="Use only methods whose output nothing that a drafter says can change."
        ),
    ] = False,
    server: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Let `serve grpc` make it; --drafter is then the name of one of its drafters."
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="Of the server; by default its only one.")] = None,
    api_key: Annotated[
        str, typer.Option(metavar="KEY", envvar="CROSSDRAFT_API_KEY", help="Of the server.", show_envvar=True)
    ] = "",
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Continue a prompt. Without addresses, the bundled models are run for as long as it takes."""
    from crossdraft.cli import generate as command
    from crossdraft.cli import remote
    from crossdraft.cli.running import checked_options
    from crossdraft.pipeline import GenerationRequest, Overlap, SamplingOptions

    with checked_options():
        biases = command.logit_biases(logit_bias or ())
        request = GenerationRequest(
            command.read_prompt(prompt),
            method=method,
            k=k,
            max_tokens=max_tokens,
            options=SamplingOptions(
                temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, logit_bias=biases
            ),
            drafter_temperature=drafter_temperature,
            seed=seed,
            ignore_eos=ignore_eos,
            stop=tuple(command.checked_text(text) for text in stop or ()),
            allow_inexact=allow_inexact,
            audit=audit,
            overlap=Overlap(overlap.value),
            window=window,
            wait=wait,
            branches=branches,
            branch_width=branch_width,
            paths=paths,
            speculation=speculation,
            explain=explain,
            record=record,
        )
    if server is not None:
        if target is not None or untrusted_drafter:
            raise Misused("--target and --untrusted-drafter are the server's own: leave them out, or --server")
        if tls_cert is not None or tls_key is not None:
            raise Misused("a server wants no certificate: give --tls-ca alone, for the CA of its own, and --api-key")
        asked = remote.Asked(server, model or "", drafter, api_key, tls_ca)
        remote.generate(request, asked, as_json)
        return
    if model is not None:
        raise Misused("--model is a name that a server knows: give --server, or --target for a model's address")
    services = command.Given(target, drafter, tls_of(tls_ca, tls_cert, tls_key), not untrusted_drafter)
    command.generate(request, services, as_json)


def demo(
    prompt: Prompt = None,
    k: Annotated[int, typer.Option("-k", help="Proposals in a round.")] = 5,
    max_tokens: MaxTokens = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Both generations have it, so their texts must be equal.")] = 7,
) -> None:
    """Generate with the bundled models, with the drafter and without, side by side."""
    from crossdraft.cli import demo as command
    from crossdraft.cli.generate import read_prompt
    from crossdraft.cli.running import checked_options
    from crossdraft.pipeline import GenerationRequest, Overlap, SamplingOptions

    with checked_options():
        options = SamplingOptions(temperature)
        request = GenerationRequest(
            read_prompt(prompt), k=k, max_tokens=max_tokens, options=options, seed=seed, overlap=Overlap.OFF
        )
    command.demo(request)
