"""The small parts of a deployment: its own Redis, its secret, and what an installation prints."""

import base64
from typing import Any

from benchmarks import chart_objects
from benchmarks.chart_objects import NAMESPACE, RELEASE
from tests.support.chart import SECRET, container, environment, of_kind, pod, rendered


def notes(**values: Any) -> str:
    files = chart_objects.chart().render(values, name=RELEASE, namespace=NAMESPACE)
    (text,) = (text for name, text in files.items() if name.endswith("NOTES.txt"))
    return text


def test_the_redis_of_the_chart_keeps_hints_in_memory_behind_a_password() -> None:
    found = container(rendered(redis={"memoryMib": 300}), "redis")
    options = dict(zip(found["args"][::2], found["args"][1::2], strict=True))
    assert options["--requirepass"] == "$(REDIS_PASSWORD)"
    assert environment(found)["REDIS_PASSWORD"] == SECRET
    assert (options["--save"], options["--appendonly"]) == ("", "no")
    assert options["--maxmemory"] == "300mb" and options["--maxmemory-policy"] == "allkeys-lru"
    assert found["resources"]["limits"]["memory"] == "428Mi"


def test_services_log_into_it_with_the_password_of_the_same_secret() -> None:
    objects = rendered()
    for service in ("router", "prefill", "decode"):
        variables = environment(container(objects, service))
        (url,) = (value for name, value in variables.items() if name.endswith("REDIS_URL"))
        assert url == f"redis://:{SECRET}@demo-redis:6379"


def test_it_goes_where_it_is_told_and_needs_no_volume() -> None:
    place = {"nodeSelector": {"a": "b"}, "tolerations": [{"operator": "Exists"}]}
    spec = pod(rendered(redis=place), "redis")
    assert spec["nodeSelector"] == place["nodeSelector"]
    assert spec["tolerations"] == place["tolerations"]
    assert "volumes" not in spec


def test_a_secret_that_is_made_is_long_and_of_this_installation_alone() -> None:
    def made() -> dict[str, bytes]:
        (secret,) = of_kind(chart_objects.render(), "Secret").values()
        return {name: base64.b64decode(text) for name, text in secret["data"].items()}

    first, second = made(), made()
    assert first.keys() == {"secret", "redis-password"}
    assert len(first["secret"]) == 64 and len(first["redis-password"]) == 32
    assert not {*first.values()} & {*second.values()}


def test_no_password_is_made_for_a_redis_of_yours() -> None:
    objects = rendered(redis={"external": {"host": "redis.example"}})
    (secret,) = of_kind(objects, "Secret").values()
    assert secret["data"].keys() == {"secret"}


def test_an_installation_tells_how_to_reach_it() -> None:
    assert "kubectl -n serving port-forward service/demo-gateway 8000" in notes()
    assert "demo-gateway" in {item["metadata"]["name"] for item in rendered()}


def test_an_installation_without_keys_is_warned() -> None:
    assert "Whoever reaches the gateway may use it" in notes()
    assert "Whoever" not in notes(gateway={"apiKeysSecret": "tenants"})
