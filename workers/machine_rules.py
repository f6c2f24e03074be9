"""What stands in the way on this machine beside GPUs: commands, port, Redis, environment. Pure; see preflight.py."""

from __future__ import annotations

from collections.abc import Iterator

from gateway.config.schema import slots_of
from workers.facts import Facts, PortUse
from workers.finding import Finding, Part, Severity


def machine_findings(facts: Facts) -> Iterator[Finding]:
    yield from _commands(facts)
    if facts.port is not None:
        yield _port(facts, facts.port)
    if facts.redis is not None:
        yield Finding(Severity.ERROR, Part.REDIS, "redis.url", facts.redis.fact, facts.redis.way_out)
    if facts.state_dir is not None:
        trouble = facts.state_dir
        yield Finding(Severity.ERROR, Part.HOST, "gateway.state_dir", trouble.fact, trouble.way_out)
    yield from _keys(facts)
    for key, trouble in facts.outside:
        yield Finding(Severity.ERROR, Part.GATEWAY, key, trouble.fact, trouble.way_out)
    yield from _bounds(facts)
    for variable, key in facts.overrides:
        fact = f"comes from the environment variable {variable}, not from the file"
        yield Finding(Severity.HINT, Part.HOST, key, fact, "unset it to have the file's value")


def _bounds(facts: Facts) -> Iterator[Finding]:
    bounded = slots_of(facts.config.pools)
    for name in facts.config.pools:
        if name not in bounded:
            yield Finding(
                Severity.HINT,
                Part.GATEWAY,
                f"pools.{name}.max_in_flight",
                "is not set, nor is max_num_seqs: however many requests come, all are sent to the engine at once",
                "set it to what one replica works on well at once; more then wait by class (docs/queues.md)",
            )


def _commands(facts: Facts) -> Iterator[Finding]:
    told: set[str] = set()
    for spec in facts.specs:
        key = f"pools.{spec.pool}.vllm" if facts.config.pools[spec.pool].vllm else "workers.vllm"
        trouble = facts.commands.get(spec.vllm)
        if trouble is not None and key not in told:
            told.add(key)
            yield Finding(Severity.ERROR, Part.WORKERS, key, trouble.fact, trouble.way_out)


def _port(facts: Facts, use: PortUse) -> Finding:
    host, port = facts.config.gateway.host, facts.config.gateway.port
    severity, key = Severity.ERROR, "gateway.port"
    if use.is_ours:
        severity = Severity.HINT
        fact, way_out = f"{port} on {host} is held by this very gateway (pid {use.pid})", "it runs; nothing to do"
    elif use.problem == "taken":
        who = f"pid {use.pid} ({use.program})" if use.pid is not None else "a process of another user"
        fact, way_out = f"{port} on {host} is taken by {who}", "stop it, or choose another port"
    elif use.problem == "forbidden":
        fact = f"{port} may not be listened on by this user ({use.detail})"
        way_out = "choose a port from 1024 on, or allow it (CAP_NET_BIND_SERVICE)"
    else:
        key = "gateway.host"
        fact = f"cannot listen on {host}:{port} ({use.detail})"
        way_out = 'use an address of this machine, "127.0.0.1" or "0.0.0.0"'
    return Finding(severity, Part.GATEWAY, key, fact, way_out)


def _keys(facts: Facts) -> Iterator[Finding]:
    if facts.config.metrics.key_env in facts.unset_variables:
        fact = f"environment variable {facts.config.metrics.key_env} is not set here: the gateway will not start"
        way_out = "set it where the gateway starts, or remove the key"
        yield Finding(Severity.ERROR, Part.GATEWAY, "metrics.key_env", fact, way_out)
    owner: dict[str, str] = {}
    for name, key in facts.config.keys.items():
        if key.key_env is not None and key.key_env in facts.unset_variables:
            yield Finding(
                Severity.WARNING,
                Part.GATEWAY,
                f"keys.{name}.key_env",
                f"environment variable {key.key_env} is not set here: the key is off",
                "set it where the gateway starts, or give sha256 instead",
            )
        digest = facts.key_digests.get(name)
        if digest is not None and owner.setdefault(digest, name) != name:
            yield Finding(
                Severity.ERROR,
                Part.GATEWAY,
                f"keys.{name}",
                f"is the same key as keys.{owner[digest]}: who calls could not be told",
                "remove one of the two",
            )
