from pathlib import Path

from paceline.cli.cluster import ClusterSpec


def test_settings_of_a_process_come_before_those_of_its_role() -> None:
    settings = {"decode": {"device": "cuda:0", "pool_mib": 64}, "decode-1": {"device": "cuda:1"}}
    spec = ClusterSpec(Path(), decode=2, settings=settings)
    assert spec.settings_of("decode-0", "decode") == {"device": "cuda:0", "pool_mib": 64}
    assert spec.settings_of("decode-1", "decode") == {"device": "cuda:1", "pool_mib": 64}
    assert spec.settings_of("prefill-0", "prefill") == {}
