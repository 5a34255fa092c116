"""`localspec run`: one prompt, one answer, on stdout."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from contextlib import aclosing
from typing import Any

import click

from localspec.api.types import Delta, Done, EngineError, GenerateRequest, Message, Sampling
from localspec.commands.common import (
    check_model_is_there,
    default_model,
    fail_engine,
    local_engine,
    print_json,
    read_prompt,
    settings,
)
from localspec.commands.options import (
    check_number,
    context_option,
    depth_option,
    device_option,
    drafter_option,
    fp4_prompts_option,
    json_option,
    kv_cache_option,
    learn_option,
    model_option,
    offline_option,
)
from localspec.tui.text import clean


@click.command()
@click.argument("prompt")
@model_option
@drafter_option
@depth_option
@context_option
@device_option
@kv_cache_option
@fp4_prompts_option
@offline_option
@learn_option
@json_option
@click.option(
    "--temperature", type=click.FloatRange(0.0), callback=check_number, help="0 is greedy. Default: the model's own."
)
@click.option("--max-tokens", type=click.IntRange(1), help="Default: what the context leaves.")
@click.option("--seed", type=int, help="Default: a fresh one.")
@click.option("--system", help="System message.")
@click.option("--raw", is_flag=True, help="Give the prompt to the model as it is, without the chat template.")
def run(**options: Any) -> None:
    """Answer PROMPT (or stdin, with -) and exit. Text on stdout, everything else on stderr."""
    config = settings()
    prompt = read_prompt(options["prompt"])
    model_id = options["model"] or default_model(config)
    try:
        # What is wrong with the request is said before the engine is imported, which takes seconds.
        check_model_is_there(config, model_id)
    except EngineError as error:
        fail_engine(error)
    engine = local_engine(config, options["offline"] or config.network.offline, options)
    try:
        document = asyncio.run(_answer(engine, model_id, prompt, options))
    except EngineError as error:
        fail_engine(error)
    if options["as_json"]:
        print_json(document)


async def _answer(engine: Any, model_id: str, prompt: str, options: dict[str, Any]) -> dict[str, Any]:
    engine.start(model_id)
    try:
        info = await engine.wait_ready()
        request = _request(prompt, info.sampling, info.has_chat_template, options)
        if not options["as_json"] and info.demo:
            click.echo(f"[demo model {info.id}] {info.note}", err=True)
        # A pipe gets the exact text; a terminal must not obey control codes of a model.
        is_terminal = sys.stdout.isatty()
        text, done = "", None
        ids: list[int] = []
        async with aclosing(engine.generate(request)) as events:
            async for event in events:
                if isinstance(event, Delta):
                    text += event.text
                    ids.extend(event.token_ids)
                    if not options["as_json"]:
                        click.echo(clean(event.text) if is_terminal else event.text, nl=False)
                elif isinstance(event, Done):
                    done = event
        if not options["as_json"]:
            click.echo()  # before the engine closes, which may have something to say on stderr
        assert done is not None
        return {
            "text": text,
            "token_ids": ids,
            "prompt_tokens": done.usage.prompt_tokens,
            "finish_reason": done.finish_reason,
            "model": info.id,
            "drafter": options["drafter"],
            "timings": dataclasses.asdict(done.timings),
        }
    finally:
        await engine.aclose()


def _request(prompt: str, preset: Sampling, has_template: bool, options: dict[str, Any]) -> GenerateRequest:
    sampling = dataclasses.replace(preset, seed=options["seed"])
    if options["temperature"] is not None:
        sampling = dataclasses.replace(sampling, temperature=options["temperature"])
    shared: dict[str, Any] = {"sampling": sampling, "max_tokens": options["max_tokens"], "client": "run"}
    shared |= {"drafter": options["drafter"], "depth": options["depth"]}
    if options["raw"] or not has_template:
        return GenerateRequest(prompt=prompt, **shared)
    system = (Message("system", options["system"]),) if options["system"] else ()
    return GenerateRequest(messages=(*system, Message("user", prompt)), **shared)
