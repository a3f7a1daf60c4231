"""Entry point of `paceline COMMAND …`.

Commands are import paths, resolved only when one is chosen: `paceline --help` imports nothing of
ours but core, and `paceline gateway` never imports torch.
"""

import difflib
import errno
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.core.config import parse, settings_of
from paceline.core.errors import ConfigError, PacelineError

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


@dataclass(frozen=True, slots=True)
class Command:
    """`config` and `run` are `module:attribute`; run(config) blocks and returns an exit code."""

    summary: str
    config: str
    run: str


COMMANDS = {
    "up": Command(
        "start a whole deployment on this machine, until Ctrl-C",
        "paceline.cli.up:UpConfig",
        "paceline.cli.up:run",
    ),
    "gateway": Command(
        "HTTP (OpenAI) and gRPC front door: text in, text out",
        "paceline.gateway.config:GatewayConfig",
        "paceline.gateway.processes:run",
    ),
    "router": Command(
        "admits requests, picks workers, keeps the token log",
        "paceline.router.config:RouterConfig",
        "paceline.router.main:run",
    ),
    "prefill": Command(
        "a worker that computes prompts and hands their KV over",
        "paceline.worker.config:WorkerConfig",
        "paceline.prefill_service.main:run",
    ),
    "decode": Command(
        "a worker that pulls KV and generates tokens",
        "paceline.worker.config:WorkerConfig",
        "paceline.decode_service.main:run",
    ),
    "explain": Command(
        "print the routers' last decisions, with the terms of their costs",
        "paceline.cli.explain:ExplainConfig",
        "paceline.cli.explain:run",
    ),
    "role": Command(
        "show what workers do, or change what one does while it serves",
        "paceline.cli.role:RoleConfig",
        "paceline.cli.role:run",
    ),
    "rebalance": Command(
        "move workers between prefill and decode as their queues ask for",
        "paceline.cli.rebalance:RebalanceConfig",
        "paceline.cli.rebalance:run",
    ),
    "top": Command(
        "show workers, queues, rates and links, live",
        "paceline.cli.top:TopConfig",
        "paceline.cli.top:run",
    ),
    "links": Command(
        "show the links between workers: transport, speed, self-test, state",
        "paceline.cli.links:LinksConfig",
        "paceline.cli.links:run",
    ),
    "sim": Command(
        "replay a trace on simulated workers: how many of each role",
        "paceline.sim.main:SimConfig",
        "paceline.sim.main:run",
    ),
    "bench": Command(
        "send the same trace to a live deployment: times, failures, hit rate",
        "paceline.sim.bench:BenchConfig",
        "paceline.sim.bench:run",
    ),
    "demo-model": Command(
        "fetch and convert the demo model once; prints its folder",
        "paceline.cli.demo_model:DemoModelConfig",
        "paceline.cli.demo_model:run",
    ),
}

HELP = """\
usage: paceline COMMAND [--setting VALUE …]

Serves large language models with prefill and decode on separate workers.

Commands:
{commands}

`paceline COMMAND --help` lists the settings of a command. Each can also come
from the environment: `--queue-limit 8` of the router is
PACELINE_ROUTER_QUEUE_LIMIT=8; the command line wins.

Start here, on one machine, no GPU needed:
  paceline up --model "$(paceline demo-model)"

Each service by hand; all know one secret, of 16 bytes at least, and one Redis:
  export PACELINE_ROUTER_SECRET="$(head -c 24 /dev/urandom | base64)"
  export PACELINE_WORKER_SECRET="$PACELINE_ROUTER_SECRET"
  export PACELINE_GATEWAY_SECRET="$PACELINE_ROUTER_SECRET"
  paceline router --redis-url redis://127.0.0.1:6379
  paceline prefill --model DIR --redis-url redis://127.0.0.1:6379
  paceline decode --model DIR --redis-url redis://127.0.0.1:6379
  paceline gateway --model DIR
"""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(help_text(), end="")
        return 0 if arguments else EXIT_USAGE
    name, *rest = arguments
    if name in ("version", "--version", "-V"):
        print(f"paceline {importlib.import_module('paceline').__version__}")
        return 0
    if name not in COMMANDS:
        return complain(unknown(name), EXIT_USAGE)
    return guarded(name, rest)


def guarded(name: str, argv: Sequence[str]) -> int:
    """Runs a command; what the user can mend becomes one line on stderr, not a traceback."""
    try:
        return run_command(name, argv)
    except ConfigError as error:
        return complain(error.message + pointer(name, error.field), EXIT_USAGE)
    except PacelineError as error:
        return complain(error.message, EXIT_FAILED)
    except KeyboardInterrupt:
        return complain("interrupted", EXIT_INTERRUPTED)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        where = f" while writing {error.filename}" if error.filename else ""
        return complain(f"the disk is full{where}: free some space and try again", EXIT_FAILED)


def pointer(name: str, field: str | None) -> str:
    """Where a setting is explained; nowhere if the command has none of that name."""
    settings = settings_of(resolve(COMMANDS[name].config))
    is_setting = any(setting.name == field for setting in settings)
    return f" (see `paceline {name} --help`)" if is_setting else ""


def run_command(name: str, argv: Sequence[str]) -> int:
    command = COMMANDS[name]
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # else gRPC logs each child we start
    summary = f"{command.summary[0].upper()}{command.summary[1:]}."
    config = parse(resolve(command.config), argv, os.environ, name, summary)
    run: Callable[[Any], int] = resolve(command.run)
    return run(config)


def resolve(path: str) -> Any:
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)


def help_text() -> str:
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:<{width}}{command.summary}" for name, command in COMMANDS.items()]
    lines.append(f"  {'version':<{width}}print the version")
    return HELP.format(commands="\n".join(lines))


def unknown(name: str) -> str:
    close = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"there is no command {name!r}.{hint} `paceline --help` lists them."


def complain(text: str, code: int) -> int:
    print(f"paceline: {text}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
