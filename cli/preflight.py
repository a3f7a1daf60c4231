"""What can be refused before anything starts: settings of each service, the model, the memory."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.cli.cluster import ClusterSpec
from paceline.cli.roles import ENV_PREFIX, Role, as_text
from paceline.cli.setup_error import SetupError
from paceline.core.config import Config, parse
from paceline.core.errors import ConfigError
from paceline.core.host_memory import available_bytes
from paceline.core.kv_layout import ELEMENT_BYTES
from paceline.core.model_files import read_json
from paceline.gateway.config import GatewayConfig
from paceline.kv_transfer.tiers.config import host_bytes, load_tiers
from paceline.models.architectures import MOCK, architecture_of
from paceline.models.weight_files import num_resident_bytes, weight_files
from paceline.router.config import RouterConfig
from paceline.worker.config import ComputeSettings, WorkerConfig

_ANY_SECRET = "not the deployment's"  # of the right length; nothing starts with it
_ROUNDED_BYTES = {"int8": 1.0, "int4": 0.5}  # of a weight, at least


def check(spec: ClusterSpec, environ: Mapping[str, str], own: frozenset[str]) -> None:
    """Raises ConfigError for a setting in `own`, which the caller names, or for the model;
    SetupError, which says where else to look, for one that came by the environment."""
    model = spec.model
    _config("router", RouterConfig, {}, spec, environ, own)
    _config("gateway", GatewayConfig, {"model": model}, spec, environ, own)
    counts: dict[Role, int] = {"prefill": spec.prefill, "decode": spec.decode}
    roles = [role for role, count in counts.items() for _ in range(count)]
    workers = [_config(role, WorkerConfig, {"model": model}, spec, environ, own) for role in roles]
    files = _weight_files(model)
    for device in {worker.compute.device for worker in workers} - {"cpu"}:
        _check_device(device)
    _check_memory([worker for worker in workers if worker.compute.device == "cpu"], files)


def _config(
    role: Role,
    kind: type[Any],
    settings: Mapping[str, object],
    spec: ClusterSpec,
    environ: Mapping[str, str],
    own: frozenset[str],
) -> Any:
    """What the service will read: `settings` and the deployment's by arguments, the rest by
    environment."""
    merged = {**settings, **spec.settings.get(role, {})}
    variables = {**environ, **spec.environment, ENV_PREFIX[role] + "SECRET": _ANY_SECRET}
    variables[ENV_PREFIX[role] + "REDIS_URL"] = spec.redis_url or "redis://127.0.0.1"
    arguments = [f"--{key.replace('_', '-')}={as_text(value)}" for key, value in merged.items()]
    config: type[Config] = kind
    try:
        return parse(config, arguments, variables, role)
    except ConfigError as error:
        if error.field in own:
            raise
        raise SetupError(f"{error.message} (see `paceline {role} --help`)") from None


def _weight_files(model: Path) -> list[Path]:
    architecture = architecture_of(read_json(model / "config.json").get("architectures"))
    return [] if architecture == MOCK else weight_files(model)


def _check_device(device: str) -> None:
    from paceline.worker.device import check_device  # torch: only where one is asked for

    check_device(device)


def _check_memory(workers: list[WorkerConfig], files: list[Path]) -> None:
    """Each worker has a pool, tiers and weights of its own."""
    tiers = sum(host_bytes(load_tiers(worker.tiers)) for worker in workers)
    needed = tiers + sum(
        worker.compute.pool_bytes + num_resident_bytes(files, _element_bytes(worker.compute))
        for worker in workers
    )
    available = available_bytes()
    if available is not None and needed > available:
        reason = (
            f"page pools{', tiers' if tiers else ''} and weights of {len(workers)} workers need"
            f" {needed >> 20} MiB,"
            f" {available >> 20} MiB are available"
        )
        raise ConfigError("pool_mib", max(worker.compute.pool_mib for worker in workers), reason)


def _element_bytes(compute: ComputeSettings) -> float:
    dtype = "float32" if compute.dtype == "auto" else compute.dtype
    return _ROUNDED_BYTES.get(compute.quantization, float(ELEMENT_BYTES[dtype]))
