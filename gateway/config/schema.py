"""config.toml as types: names, units, defaults. What a file says about itself is checked here; the machine is not.

Sections are frozen; unknown keys are errors. Cross-section checks (names, cycles, GPU shares) are in `rules.py`.
vLLM's own options keep vLLM's own names.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, SettingsConfigDict

from gateway.config.redis_url import read_redis_url
from gateway.domain.media import AUDIO_TOKENS, IMAGE_TOKENS, VIDEO_TOKENS
from gateway.domain.request import Limits

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._/:-]{0,127}$"
Name = Annotated[str, Field(pattern=NAME_PATTERN)]
ModelName = Annotated[str, Field(min_length=1, max_length=256)]
PlainText = Annotated[str, Field(min_length=1, pattern=r"^[^\x00]+$")]  # no path or name holds a NUL
EnvName = Annotated[str, Field(pattern=r"^[^=\x00]+$")]
EnvValue = Annotated[str, Field(pattern=r"^[^\x00]*$")]
PositiveSeconds = Annotated[float, Field(gt=0, le=604_800)]  # a week: "for ever" is a mistake here
ENV_KEY_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]*$"
TomlValue = str | int | float | bool | list[Any] | dict[str, Any]

# flags that the supervisor sets itself; in vllm_args they would fight with it
RESERVED_VLLM_ARGS = frozenset(
    {
        "model",
        "served_model_name",
        "host",
        "port",
        "uds",
        "api_key",
        "root_path",
        "api_server_count",
        "data_parallel_size",
        "config",
    }
)


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """pydantic takes `true` for 1; a port of `true` is a slip."""
        if isinstance(value, bool):
            annotation = cls.model_fields[info.field_name or ""].annotation
            kinds = get_args(annotation) or (annotation,)
            if bool not in kinds and (int in kinds or float in kinds):
                raise ValueError("must be a number, not true or false")
        return value


class TimeoutsSection(Section):
    """Deadlines of one request, in seconds."""

    body_s: PositiveSeconds = 30  # silence while the client sends its body
    connect_s: PositiveSeconds = 2
    first_byte_s: PositiveSeconds = 120
    gap_s: PositiveSeconds = 60  # silence between two reads of a reply
    write_s: PositiveSeconds = 60  # a client that takes nothing of its reply
    total_s: PositiveSeconds = 600


class RetrySection(Section):
    """When another replica is asked after one failed, before the caller has got a byte."""

    attempts: int = Field(2, ge=1, le=5)  # replicas that are asked for one request at most
    within_s: PositiveSeconds = 10  # no further attempt begins later than this
    share: float = Field(0.2, ge=0, le=1)  # further attempts, of all requests
    replay_in_flight: bool = False  # also a request whose replica died with it


class GatewaySection(Section):
    host: PlainText = "127.0.0.1"
    port: int = Field(8080, ge=1, le=65535)
    processes: int = Field(1, ge=0, le=256)  # 0: one per core
    max_body_bytes: int = Field(8_388_608, ge=1024)
    drain_s: PositiveSeconds = 30
    state_dir: PlainText = ".poolgate"  # relative to the config file
    sse_keepalive_s: float = Field(0, ge=0, le=3600)  # comment lines in a silent stream; 0: none
    timeouts: TimeoutsSection = TimeoutsSection()
    retry: RetrySection = RetrySection()


class RedisSection(Section):
    url: SecretStr = SecretStr("embedded")  # may hold a password: never printed
    on_outage: Literal["share", "open", "closed"] = "share"
    timeout_s: PositiveSeconds = 0.05  # one call of the request path

    @field_validator("url")
    @classmethod
    def _known_scheme(cls, url: SecretStr) -> SecretStr:
        text = url.get_secret_value()
        if text != "embedded":
            read_redis_url(text)
        return url

    @property
    def is_embedded(self) -> bool:
        return self.url.get_secret_value() == "embedded"


class ClassSection(Section):
    """A class of callers. Lower priority goes first, as in vLLM."""

    priority: int = Field(0, ge=-1000, le=1000)
    queue_s: PositiveSeconds = 30  # a request waits so long for a slot of a full pool, then it is refused
    queue_max: int = Field(256, ge=0, le=1_000_000)  # so many may wait for a pool; 0: nobody


class LimitsSection(Section):
    """Budgets; an absent one is not limited."""

    requests_per_min: int | None = Field(None, ge=1, le=10**9)
    tokens_per_min: int | None = Field(None, ge=1, le=10**12)
    in_flight: int | None = Field(None, ge=1, le=10**6)
    tokens_per_day: int | None = Field(None, ge=1, le=10**14)  # days and months end at 00:00 UTC
    tokens_per_month: int | None = Field(None, ge=1, le=10**14)


class MetricsSection(Section):
    """`/metrics`: open to all who reach the port, unless the variable named here holds a key for it."""

    key_env: str | None = Field(None, pattern=ENV_KEY_PATTERN)


class UserSection(Section):
    limits: LimitsSection = LimitsSection()


class KeySection(Section):
    """A static key: its SHA-256, or the name of the environment variable that holds it."""

    key_env: str | None = Field(None, pattern=ENV_KEY_PATTERN)
    sha256: str | None = Field(None, pattern=r"^[0-9a-fA-F]{64}$")
    user: str | None = None
    # default: the class named "default", else the one nearest to vLLM's own default priority 0 (never one above it
    # by omission while one at 0 exists), see admission/classes.py
    class_: str | None = Field(None, alias="class")
    models: list[str] = ["*"]
    limits: LimitsSection = LimitsSection()

    @model_validator(mode="after")
    def _one_source(self) -> KeySection:
        if (self.key_env is None) == (self.sha256 is None):
            raise ValueError(
                "needs exactly one of key_env and sha256 (a key in clear is refused); give the name of an environment "
                "variable, or 64 hex digits"
            )
        return self


class WorkersSection(Section):
    vllm: str = "vllm"  # the command; with a slash in it: relative to the config file
    env: dict[EnvName, EnvValue] = {}  # for every worker
    load_s: PositiveSeconds = 1800  # from spawn to ready
    stop_s: PositiveSeconds = 20  # from SIGTERM to SIGKILL


class ReplicaSection(Section):
    """One worker. No `gpus`: GPU 0 where there is an NVIDIA GPU, else the CPU."""

    gpus: list[int | str] | None = None  # index, GPU-UUID or MIG-UUID; [] forces the CPU


def check_replica_url(url: str) -> None:
    """Raises ValueError for what is no address of a server; never repeats the url, which may hold a secret."""
    if url.startswith("unix:/"):
        if len(url.removeprefix("unix:").strip("/")) == 0:
            raise ValueError("names no socket; write unix:/path/of.sock")
        return
    try:
        parts = urlsplit(url)
        port, host = parts.port, parts.hostname
    except ValueError as exc:
        raise ValueError("cannot be read; write https://host:port, brackets around IPv6") from exc
    if parts.scheme not in ("http", "https") or not host or port == 0:
        raise ValueError(
            "is no address of a server; write http://host:port, https://host or unix:/path/of.sock, a path may follow"
        )
    if "@" in parts.netloc:
        raise ValueError("has a user or a password in it; remove them, and give the key with key_env")
    if "?" in url or "#" in url:
        raise ValueError("has a query string or a fragment, which no request would carry; remove it")
    if not url.isascii() or any(c.isspace() or not c.isprintable() for c in url):
        raise ValueError("has characters that no url has; write them percent-encoded")


ELSEWHERE_KEYS = frozenset({"urls", "engine", "key_env", "tls_ca"})  # of pools that somebody else runs


WITH_BOTH_KEYS = frozenset(
    {
        "served_name",
        "max_model_len",
        "max_in_flight",
        "scheduling_policy",
        "image_tokens",
        "audio_tokens",
        "video_tokens",
    }
)


class PoolSection(Section):
    """Interchangeable replicas: workers of this host (`model`), or servers that somebody else runs (`urls`)."""

    model: str | None = None  # directory (with a slash: relative to the config file) or hub name
    urls: list[str] | None = None
    engine: Literal["vllm", "openai"] = "vllm"  # what runs at the urls; "openai": nothing that only vLLM knows is sent
    key_env: str | None = Field(None, pattern=ENV_KEY_PATTERN)  # variable that holds the key of the urls
    tls_ca: PlainText | None = None  # PEM file, relative to the config file; default: the public authorities
    served_name: str | None = None  # default: the pool's name; for urls: the name those servers know
    vllm: str | None = None  # this pool on another vLLM
    env: dict[EnvName, EnvValue] = {}
    tensor_parallel_size: int = Field(1, ge=1, le=64)
    quantization: str | None = None
    dtype: str | None = None
    max_model_len: int | None = Field(None, ge=1)
    gpu_memory_utilization: float | None = Field(None, gt=0, le=1)
    max_num_seqs: int | None = Field(None, ge=1)
    max_in_flight: int | None = Field(
        None, ge=1, le=1_000_000
    )  # slots of a replica; default: max_num_seqs, or no bound
    scheduling_policy: Literal["fcfs", "priority"] | None = None
    image_tokens: int = Field(IMAGE_TOKENS, ge=1, le=1_000_000)  # reserved for each, until the engine tells
    audio_tokens: int = Field(AUDIO_TOKENS, ge=1, le=1_000_000)
    video_tokens: int = Field(VIDEO_TOKENS, ge=1, le=1_000_000)
    vllm_args: dict[str, TomlValue] = {}
    replicas: list[ReplicaSection] = [ReplicaSection()]

    @field_validator("urls")
    @classmethod
    def _addresses(cls, urls: list[str] | None) -> list[str] | None:
        for url in urls or []:
            check_replica_url(url)
        return urls

    @field_validator("vllm_args")
    @classmethod
    def _not_reserved(cls, args: dict[str, TomlValue]) -> dict[str, TomlValue]:
        own = {"tensor_parallel_size", "quantization", "dtype", "max_model_len", "gpu_memory_utilization"}
        own |= {"max_num_seqs", "scheduling_policy"}
        for name in args:
            plain = name.replace("-", "_").lstrip("_")
            if plain in RESERVED_VLLM_ARGS:
                raise ValueError(f'"{name}" is set by Poolgate itself; remove it')
            if plain in own:
                raise ValueError(f'"{name}" has a key of its own; write it as {plain} = … in the pool')
        return args

    @model_validator(mode="after")
    def _one_kind(self) -> PoolSection:
        if (self.model is None) == (self.urls is None):
            raise ValueError(
                "needs exactly one of model and urls; give model for workers of this host, or urls of servers that "
                "others run"
            )
        if self.urls is not None:
            worker_keys = self.model_fields_set - ELSEWHERE_KEYS - WITH_BOTH_KEYS
            if worker_keys:
                raise ValueError(
                    f"{', '.join(sorted(worker_keys))} is only for pools with model; remove it, or give model, not urls"
                )
            if not self.urls:
                raise ValueError("urls is empty; list at least one")
            if self.engine != "vllm" and self.scheduling_policy is not None:
                raise ValueError('scheduling_policy is only for engine = "vllm"; remove it')
            if self.tls_ca is not None and not any(url.startswith("https://") for url in self.urls):
                raise ValueError("tls_ca is only for urls that begin with https://; remove it, or write the urls so")
        elif not self.replicas:
            raise ValueError("replicas is empty; list at least one, e.g. replicas = [{ gpus = [0] }]")
        elif foreign := self.model_fields_set & ELSEWHERE_KEYS:
            raise ValueError(
                f"{', '.join(sorted(foreign))} is only for pools with urls; remove it, or give urls, not model"
            )
        return self


class TargetSection(Section):
    pool: str
    weight: float = Field(1.0, gt=0, le=1_000_000)


class OrderSection(Section):
    targets: list[TargetSection] = Field(min_length=1)
    fallback: list[str] = []


class RouteSection(Section):
    """What a client writes in `model`."""

    aliases: list[ModelName] = []
    targets: list[TargetSection] = Field(min_length=1)
    fallback: list[str] = []  # pools in order, when no replica of the targets can serve
    by_class: dict[str, OrderSection] = {}  # another pool order for the callers of a class
    max_output_tokens: int | None = Field(None, ge=1)
    on_max_output: Literal["clamp", "refuse"] = "clamp"
    defaults: dict[str, TomlValue] = {}  # sampling settings, only where the client said nothing
    limits: LimitsSection = LimitsSection()

    @field_validator("defaults")
    @classmethod
    def _only_sampling(cls, defaults: dict[str, TomlValue]) -> dict[str, TomlValue]:
        owned = {"model", "messages", "prompt", "stream", "stream_options", "max_tokens", "max_completion_tokens"}
        for name in sorted(owned | {"priority", "n"}):
            if name in defaults:
                raise ValueError(f'"{name}" cannot have a default; use max_output_tokens for the output cap')
        return defaults


class Config(BaseSettings):
    """The whole file. Environment variables POOLGATE_SECTION__KEY override single values."""

    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
        env_prefix="POOLGATE_",
        env_nested_delimiter="__",
        case_sensitive=False,
    )

    gateway: GatewaySection = GatewaySection()
    redis: RedisSection = RedisSection()
    metrics: MetricsSection = MetricsSection()
    classes: dict[Name, ClassSection] = Field({"default": ClassSection()}, min_length=1)
    users: dict[Name, UserSection] = {}
    keys: dict[Name, KeySection] = {}
    workers: WorkersSection = WorkersSection()
    pools: dict[Name, PoolSection] = Field(min_length=1)
    routes: dict[ModelName, RouteSection] = Field(min_length=1)


def limits_from(section: LimitsSection) -> Limits:
    return Limits(
        section.requests_per_min,
        section.tokens_per_min,
        section.in_flight,
        section.tokens_per_day,
        section.tokens_per_month,
    )


def slots_of(pools: Mapping[str, PoolSection]) -> dict[str, int]:
    """Requests that may run on one replica at once, by pool; a pool that is not in it has no bound."""
    bounds = {name: pool.max_in_flight or pool.max_num_seqs for name, pool in pools.items()}
    return {name: bound for name, bound in bounds.items() if bound is not None}


def process_count(config: Config) -> int:
    """Gateway processes of this machine."""
    return config.gateway.processes or os.cpu_count() or 1


def key_variables(config: Config) -> frozenset[str]:
    """The environment variables that hold a key in clear."""
    named = [key.key_env for key in config.keys.values()] + [pool.key_env for pool in config.pools.values()]
    named.append(config.metrics.key_env)
    return frozenset(name for name in named if name is not None)
