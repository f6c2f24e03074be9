"""The text that `poolgate up` ends its start with: what to paste to make a first call. Pure."""

from __future__ import annotations

import shlex

from gateway.config.schema import Config


def base_url(config: Config) -> str:
    """Where a client on this machine reaches the gateway."""
    host = config.gateway.host
    if host in ("0.0.0.0", ""):
        host = "127.0.0.1"
    elif host == "::":
        host = "::1"
    return f"http://{f'[{host}]' if ':' in host else host}:{config.gateway.port}/v1"


def ready_block(
    config: Config, key: str | None, revision: str, took_s: float, *, command: str = "poolgate", option: str = ""
) -> str:
    """`key`: the first key in clear, for a person at this terminal; None when the config has keys of its own.

    `command`: how this shell calls poolgate. `option`: what it needs to find this config, such as " --config FILE".
    """
    url, model = base_url(config), next(iter(config.routes))
    shown = key or "$POOLGATE_KEY"
    quoted = shlex.quote(f"Authorization: Bearer {key}") if key else f'"Authorization: Bearer {shown}"'
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "What is the capital of France?"}}]}}'
    python_key = f'"{key}"' if key else 'os.environ["POOLGATE_KEY"]'
    lines = [
        "",
        f"Poolgate is ready after {took_s:.0f} s (config revision {revision}).",
        "",
        f"  base URL   {url}",
        f"  API key    {key or 'one of your own: set POOLGATE_KEY, or make one with poolgate keys create NAME'}",
        f"  models     {', '.join(config.routes)}",
        "",
        "  With curl:",
        "",
        f"curl -sS {url}/chat/completions -H {quoted} -H 'Content-Type: application/json' \\",
        f"  -d {shlex.quote(body)}",
        "",
        "  With the OpenAI SDK (pip install openai):",
        "",
        *(["import os"] if not key else []),
        "from openai import OpenAI",
        f'client = OpenAI(base_url="{url}", api_key={python_key})',
        f'stream = client.chat.completions.create(model="{model}", stream=True,',
        '    messages=[{"role": "user", "content": "What is the capital of France?"}])',
        "for chunk in stream:",
        '    print(chunk.choices[0].delta.content or "", end="", flush=True)',
        "",
        f"  Another terminal:  {command} status{option}   {command} keys list{option}",
        "  Stop: Ctrl-C",
        "",
    ]
    return "\n".join(lines)
