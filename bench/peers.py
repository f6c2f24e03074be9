"""Starts what Poolgate is measured beside, each as lean as its own options make it. Called by rounds.py."""

from __future__ import annotations

import json
import os
from pathlib import Path

from bench.children import Children
from bench.contender import Contender, free_port
from bench.fake_upstream import SERVED_NAME
from bench.install import LITELLM_VENV, PEERS_VENV
from bench.machine import open_files_limit
from bench.request import Target

KEY = "sk-bench-0123456789abcdef"  # nginx and vllm-router read none; LiteLLM's master key

# One worker process; bytes pass on as they come, connections to the upstream are kept, requests are not logged.
_NGINX = """\
daemon off;
pid {folder}/nginx.pid;
error_log stderr warn;
worker_processes 1;
worker_rlimit_nofile {open_files};
{user}
events {{ worker_connections 65536; }}  # nginx closes idle ones when a sixteenth is left
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    keepalive_requests 1000000000;
    client_body_buffer_size 64k;
    upstream engine {{
        server 127.0.0.1:{upstream_port} max_fails=0;
        keepalive 512;
        keepalive_requests 1000000000;
    }}
    server {{
        listen 127.0.0.1:{port} backlog=4096;
        location / {{
            proxy_pass http://engine;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering off;
            proxy_read_timeout 600s;
        }}
    }}
}}
"""


def start_nginx(children: Children, folder: Path, upstream_port: int) -> Contender:
    port = free_port()
    config = folder / "nginx.conf"
    user = "user root;" if os.geteuid() == 0 else ""  # else nginx takes another, who may not write to the folder
    files = open_files_limit()
    config.write_text(_NGINX.format(folder=folder, port=port, upstream_port=upstream_port, open_files=files, user=user))
    command = ["nginx", "-c", str(config), "-e", "stderr"]
    main = children.start(f"nginx-{folder.name}", command, cores=children.cores.measured)
    return Contender("nginx", Target(port, SERVED_NAME, KEY), main)


def start_vllm_router(children: Children, folder: Path, *upstream_ports: int) -> Contender:
    """round_robin: its other policies look at the prompt, for a choice that one worker does not leave."""
    port = free_port()
    command = [str(PEERS_VENV / "bin/vllm-router"), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--worker-urls", *(f"http://127.0.0.1:{each}" for each in upstream_ports), "--policy", "round_robin"]
    command += ["--prometheus-port", str(free_port()), "--log-level", "warning"]
    main = children.start(f"vllm-router-{folder.name}", command, cores=children.cores.measured)
    return Contender("vllm-router", Target(port, SERVED_NAME, KEY), main)


def start_litellm(children: Children, folder: Path, upstream_port: int) -> Contender:
    port = free_port()
    settings = {
        "model_list": [
            {
                "model_name": SERVED_NAME,
                "litellm_params": {
                    "model": f"hosted_vllm/{SERVED_NAME}",
                    "api_base": f"http://127.0.0.1:{upstream_port}/v1",
                    "api_key": "none",
                },
            }
        ],
        "general_settings": {"master_key": KEY},
    }
    config = folder / "litellm.yaml"
    config.write_text(json.dumps(settings))  # JSON is YAML
    command = [str(LITELLM_VENV / "bin/litellm"), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
    env = {"LITELLM_LOG": "ERROR", "LITELLM_TELEMETRY": "False", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    main = children.start(
        f"litellm-{folder.name}", [*command, "--num_workers", "1"], cores=children.cores.measured, env=env
    )
    return Contender("litellm", Target(port, SERVED_NAME, KEY), main)
