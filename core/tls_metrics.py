"""When the certificate of this process expires, read when somebody asks: files may have changed."""

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from paceline.core.metrics import TLS_CERTIFICATE_EXPIRES
from paceline.core.tls import TlsConfig, credentials


class CertificateMetrics(Collector):
    """Nothing where nothing is encrypted."""

    def __init__(self, config: TlsConfig) -> None:
        self._config = config

    def collect(self) -> Iterator[Metric]:
        if shown := credentials(self._config):
            metric = TLS_CERTIFICATE_EXPIRES
            yield GaugeMetricFamily(metric, metric.help, value=shown.expires_unix_s)
