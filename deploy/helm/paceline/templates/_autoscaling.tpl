{{/* What drives a component, as a JSON list under `signals`. Names of metrics are those of
     core/metrics.py; labels come from ServiceMonitor and PodMonitor (monitoring.yaml).
       perPod   the metric of its own pods, whose average has a target
       query    for Prometheus; `kind` Value: a ratio to the target scales, AverageValue: a sum is shared
       external HPA's name of a metric of others */}}
{{- define "paceline.signals" -}}
{{- $ours := printf "namespace=%q,app_kubernetes_io_instance=%q" .root.Release.Namespace .root.Release.Name }}
{{- $pods := printf "%s,app_kubernetes_io_component=%q" $ours .component }}
{{- $targets := .values.autoscaling.targets }}
{{- $signals := list }}
{{- if eq .role "gateway" }}
{{- $signals = append $signals (dict "name" "running" "perPod" "paceline_gateway_running_requests" "target" $targets.running "kind" "AverageValue" "query" (printf "sum(paceline_gateway_running_requests{%s})" $pods)) }}
{{- else }}
{{- $signals = append $signals (dict "name" "queue" "external" "paceline_router_queue_length" "target" $targets.queue "kind" "AverageValue" "query" (printf "sum(paceline_router_queue_length{%s})" $ours)) }}
{{- $signals = append $signals (dict "name" "waiting" "perPod" "vllm:num_requests_waiting" "target" $targets.waiting "kind" "AverageValue" "query" (printf "sum(vllm:num_requests_waiting{%s})" $pods)) }}
{{- if ne .role "prefill" }}
{{- $signals = append $signals (dict "name" "kvUsage" "perPod" "vllm:kv_cache_usage_perc" "target" $targets.kvUsage "kind" "Value" "query" (printf "avg(vllm:kv_cache_usage_perc{%s})" $pods)) }}
{{- $signals = append $signals (dict "name" "interTokenSeconds" "target" $targets.interTokenSeconds "kind" "Value" "query" (printf "histogram_quantile(0.9, sum by (le) (rate(vllm:inter_token_latency_seconds_bucket{%s}[2m])))" $ours)) }}
{{- end }}
{{- if ne .role "decode" }}
{{- $signals = append $signals (dict "name" "ttftSeconds" "target" $targets.ttftSeconds "kind" "Value" "query" (printf "histogram_quantile(0.9, sum by (le) (rate(paceline_router_ttft_seconds_bucket{%s}[2m])))" $ours)) }}
{{- end }}
{{- end }}
{{- $used := list }}
{{- range $signals }}
{{- if .target }}
{{- $used = append $used . }}
{{- end }}
{{- end }}
{{- if not $used }}
{{- fail (printf "%s.autoscaling.targets: leaves every target out that its role has" .where) }}
{{- end }}
{{- toJson (dict "signals" $used) }}
{{- end }}

{{/* Quantities are whole or in thousandths. */}}
{{- define "paceline.quantity" -}}
{{- if eq (float64 (int64 .)) (float64 .) }}{{ int64 . }}{{ else }}{{ mulf . 1000 | addf 0.5 | floor | int64 }}m{{ end }}
{{- end }}

{{- define "paceline.autoscaler" -}}
{{- $scaling := .values.autoscaling }}
{{- if gt (int $scaling.minReplicas) (int $scaling.maxReplicas) }}
{{- fail (printf "%s.autoscaling.minReplicas: must not be above maxReplicas" .where) }}
{{- end }}
{{- $name := printf "%s-%s" (include "paceline.name" .root) .component }}
{{- $kind := ternary "StatefulSet" "Deployment" (eq (toString .values.stableNames) "true") }}
{{- $target := dict "apiVersion" "apps/v1" "kind" $kind "name" $name }}
{{- if eq .role "group" }}
{{- $target = dict "apiVersion" "leaderworkerset.x-k8s.io/v1" "kind" "LeaderWorkerSet" "name" $name }}
{{- end }}
{{- $behavior := dict "scaleDown" (dict "stabilizationWindowSeconds" $scaling.downSeconds) }}
{{- $signals := (include "paceline.signals" . | fromJson).signals }}
{{- if eq $scaling.kind "hpa" }}
---
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata: {{- include "paceline.metadata" (dict "root" .root "component" .component "name" $name) | nindent 2 }}
spec:
  scaleTargetRef: {{- toYaml $target | nindent 4 }}
  minReplicas: {{ $scaling.minReplicas }}
  maxReplicas: {{ $scaling.maxReplicas }}
  behavior: {{- toYaml $behavior | nindent 4 }}
  metrics:
    {{- range $signals }}
    {{- if .perPod }}
    - type: Pods
      pods:
        metric: {name: {{ .perPod | replace ":" "_" | quote }}} # adapters allow no colon
        target: {type: AverageValue, averageValue: {{ include "paceline.quantity" .target | quote }}}
    {{- else if .external }}
    - type: External
      external:
        metric:
          name: {{ .external }}
          selector:
            matchLabels: {app_kubernetes_io_instance: {{ $.root.Release.Name }}}
        target: {type: AverageValue, averageValue: {{ include "paceline.quantity" .target | quote }}}
    {{- else }}
    {{- fail (printf "%s.autoscaling.targets.%s: needs kind: keda" $.where .name) }}
    {{- end }}
    {{- end }}
{{- else }}
---
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata: {{- include "paceline.metadata" (dict "root" .root "component" .component "name" $name) | nindent 2 }}
spec:
  scaleTargetRef: {{- toYaml $target | nindent 4 }}
  minReplicaCount: {{ $scaling.minReplicas }}
  maxReplicaCount: {{ $scaling.maxReplicas }}
  advanced:
    horizontalPodAutoscalerConfig:
      behavior: {{- toYaml $behavior | nindent 8 }}
  triggers:
    {{- $prometheus := required "autoscaling.prometheus: keda needs the address of Prometheus" .root.Values.autoscaling.prometheus }}
    {{- range $signals }}
    - type: prometheus
      metricType: {{ .kind }}
      metadata:
        serverAddress: {{ $prometheus }}
        query: {{ .query | quote }}
        threshold: {{ include "paceline.text" .target | quote }}
        ignoreNullValues: "true" # before the first request there is no latency
    {{- end }}
{{- end }}
{{- end }}
