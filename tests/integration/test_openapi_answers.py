"""Whatever is asked, the gateway answers as its OpenAPI document says: schemathesis tries both what
the document allows and what it does not.

Not checked: that all that the document allows is served. A context, a vocabulary and what fields
mean together are in no schema.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.gateway_process import gateway_process

pytestmark = pytest.mark.slow

NUM_EXAMPLES = int(os.environ.get("PACELINE_OPENAPI_EXAMPLES", "30"))
THOROUGH = ["--generation-database", "none", "--phases", "coverage,fuzzing", "--checks", "all"]
IN_NO_SCHEMA = ["--exclude-checks", "positive_data_acceptance"]


@pytest.mark.timeout(600)
async def test_schemathesis_finds_no_undocumented_answer(tmp_path: Path) -> None:
    async with gateway_process(tmp_path / "model") as gateway:
        await gateway.is_ready()
        url = f"http://127.0.0.1:{gateway.port}"
        async with httpx.AsyncClient(base_url=url) as http:
            document = (await http.get("/openapi.json")).json()
        name_the_model(document)
        page = tmp_path / "openapi.json"
        page.write_text(json.dumps(document))
        command = [sys.executable, "-P", "-m", "schemathesis.cli", "run", str(page), "--url", url]
        command += [*THOROUGH, *IN_NO_SCHEMA, "--max-examples", str(NUM_EXAMPLES)]
        run = await asyncio.create_subprocess_exec(
            *command, cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        said = (await run.communicate())[0].decode()
        assert run.returncode == 0, said
        assert f"{len(document['paths'])} selected" in said and "(disabled)" in said
        assert not any('"level": "error"' in line for line in gateway.log)


def name_the_model(document: dict[str, Any]) -> None:
    """No random name would get beyond a 404."""
    schemas = document["components"]["schemas"]
    for name, schema in schemas.items():
        if name.endswith("Request"):
            names = ["mock"] if "model" in schema["required"] else ["mock", None]
            schema["properties"]["model"] = {"enum": names}
    (parameter,) = document["paths"]["/v1/models/{name}"]["get"]["parameters"]
    parameter["schema"] = {"enum": ["mock", "none"]}
