"""Structured logs of every service: one line an event, to stderr, with the service's name."""

import logging
import sys

import structlog


def configure(service: str) -> structlog.stdlib.BoundLogger:
    """Sets up structlog for this process; JSON unless stderr is a terminal.

    Call once, before the first log line. Lines of libraries that use `logging` pass through the
    same renderer from WARNING up.
    """
    interactive = sys.stderr.isatty()
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *_last(interactive),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("paceline").setLevel(logging.INFO)
    logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(f"paceline.{service}")
    structlog.contextvars.bind_contextvars(service=service)
    return logger


def _last(interactive: bool) -> list[structlog.typing.Processor]:
    if interactive:
        return [structlog.dev.ConsoleRenderer()]
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
