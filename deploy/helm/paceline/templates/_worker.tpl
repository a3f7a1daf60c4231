{{/* A pool of workers: a pod holds one, or with the role `colocated` one of each role. A pool with the
     role `group` has two kinds of pods, see pools.yaml. */}}

{{/* Settings of a pool or of one side of it: `workers`, the pool, the side; as JSON. */}}
{{- define "paceline.poolValues" -}}
{{- include "paceline.overlay" (list .root.Values.workers (omit .pool "role" "prefill" "decode")) }}
{{- end }}

{{/* The workers of a pod, or of a group the one of each kind, prefill first, as a JSON list under
     `workers`: role, values, suffix of names, port. */}}
{{- define "paceline.poolWorkers" -}}
{{- $values := include "paceline.poolValues" . | fromJson }}
{{- if has .pool.role (list "colocated" "group") }}
{{- $prefill := include "paceline.overlay" (list $values (.pool.prefill | default dict)) | fromJson }}
{{- $decode := include "paceline.overlay" (list $values (.pool.decode | default dict)) | fromJson }}
{{- $isOnePod := eq .pool.role "colocated" }}
{{- $first := dict "role" "prefill" "values" $prefill "suffix" (ternary "-prefill" "" $isOnePod) "port" 9200 }}
{{- $second := dict "role" "decode" "values" $decode "suffix" (ternary "-decode" "" $isOnePod) "port" (ternary 9210 9200 $isOnePod) }}
{{- toJson (dict "workers" (list $first $second)) }}
{{- else }}
{{- $only := dict "role" .pool.role "values" $values "suffix" "" "port" 9200 }}
{{- toJson (dict "workers" (list $only)) }}
{{- end }}
{{- end }}

{{- define "paceline.workerDevice" -}}
{{- $hasGpu := or (gt (int .gpus) 0) (not (empty .gpuClaimTemplate)) }}
{{- .device | default (ternary "cuda" "cpu" $hasGpu) }}
{{- end }}

{{/* Mebibytes of a worker: processes, pool and tiers on the host, /dev/shm. Tiers of files and
     objects take memory for three segments and for 8 MiB a reader (docs/tiers.md). */}}
{{- define "paceline.workerMib" -}}
{{- $total := add .memoryMib .shmMib }}
{{- if eq (include "paceline.workerDevice" .) "cpu" }}
{{- $total = add $total .poolMib }}
{{- end }}
{{- range .tiers }}
{{- if eq .kind "host" }}
{{- $total = add $total .capacity_mib }}
{{- else }}
{{- $segment := .segment_mib | default (ternary 16 32 (eq .kind "file")) }}
{{- $total = add $total (mul 3 $segment) 64 }}
{{- end }}
{{- end }}
{{- $total }}
{{- end }}

{{- define "paceline.workerSettings" -}}
{{- $values := .worker.values }}
{{- $port := int .worker.port }}
{{- $model := include "paceline.overlay" (list (pick .root.Values.model "name" "path") $values.model) | fromJson }}
{{- $threads := $values.threads }}
{{- if not (int $threads) }}
{{- $threads = hasSuffix "m" $values.cpu | ternary (divf (float64 (trimSuffix "m" $values.cpu)) 1000) (float64 $values.cpu) | ceil }}
{{- end }}
{{- $settings := dict "host" "0.0.0.0" "port" $port "probe_port" (add1 $port) "run_dir" "/tmp" }}
{{- $_ := set $settings "device" (include "paceline.workerDevice" $values) }}
{{- $_ := set $settings "model" $model.path }}
{{- with $model.name }}
{{- $_ := set $settings "model_name" . }}
{{- end }}
{{- $_ := set $settings "num_threads" $threads }}
{{- $_ := set $settings "pool_mib" $values.poolMib }}
{{- $_ := set $settings "transports" $values.transports }}
{{- $_ := set $settings "drain_timeout_s" $values.drainSeconds }}
{{- if $values.tiers }}
{{- $_ := set $settings "tiers" (printf "/etc/paceline/tiers/%s.yaml" .worker.role) }}
{{- end }}
{{- include "paceline.overlay" (list $settings $values.settings) }}
{{- end }}

{{- define "paceline.workerContainer" -}}
{{- $worker := .worker }}
{{- $values := $worker.values }}
{{- $device := include "paceline.workerDevice" $values }}
{{- $target := ternary "cpu" "cuda" (eq $device "cpu") }}
{{- $settings := include "paceline.workerSettings" . | fromJson }}
{{- $context := dict "root" .root "prefix" "PACELINE_WORKER_" "settings" $settings }}
{{- $memory := printf "%sMi" (include "paceline.workerMib" $values) }}
- name: {{ $worker.role }}
  image: {{ include "paceline.image" (dict "root" .root "target" $target) }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  args: [{{ $worker.role }}]
  env:
    - name: POD_NAME
      valueFrom:
        fieldRef: {fieldPath: metadata.name}
    - {name: PACELINE_WORKER_WORKER_ID, value: $(POD_NAME){{ $worker.suffix }}}
    - name: PACELINE_WORKER_ADVERTISE_HOST
      valueFrom:
        fieldRef: {fieldPath: status.podIP}
    - {name: HOME, value: /tmp} # caches of compiled kernels; the root is read-only
    {{- include "paceline.environment" $context | nindent 4 }}
    {{- include "paceline.redis" $context | nindent 4 }}
    {{- with $values.tierSecret }}
    {{- range list "AWS_ACCESS_KEY_ID" "AWS_SECRET_ACCESS_KEY" }}
    - name: {{ . }}
      valueFrom:
        secretKeyRef: {name: {{ $values.tierSecret }}, key: {{ . }}}
    {{- end }}
    {{- end }}
    {{- range $name, $value := $values.env }}
    - {name: {{ $name }}, value: {{ include "paceline.text" $value | quote }}}
    {{- end }}
  ports:
    - {name: grpc{{ $worker.suffix }}, containerPort: {{ $worker.port }}}
    - {name: probes{{ $worker.suffix }}, containerPort: {{ add1 $worker.port }}}
  {{- $port := printf "probes%s" $worker.suffix }}
  {{- $probes := dict "port" $port "startup" "/readyz" "startSeconds" $values.loadSeconds "settleSeconds" .settleSeconds }}
  {{- include "paceline.probes" $probes | nindent 2 }}
  {{- include "paceline.containerSecurity" . | nindent 2 }}
  resources:
    {{- if $values.gpuClaimTemplate }}
    claims: [{name: gpu}]
    {{- end }}
    requests:
      cpu: {{ $values.cpu | quote }}
      memory: {{ $memory }}
    limits:
      memory: {{ $memory }}
      {{- if $values.gpus }}
      {{ $values.gpuResource }}: {{ $values.gpus }}
      {{- end }}
      {{- with $values.rdma }}
      {{- if .resource }}
      {{ .resource }}: {{ .count }}
      {{- end }}
      {{- end }}
  volumeMounts:
    - {name: models, mountPath: /models, readOnly: true}
    - {name: shm{{ $worker.suffix }}, mountPath: /dev/shm}
    - {name: tmp{{ $worker.suffix }}, mountPath: /tmp}
    {{- if $values.tiers }}
    - {name: tiers, mountPath: /etc/paceline/tiers, readOnly: true}
    {{- end }}
    {{- if $values.tierVolume }}
    - {name: tier{{ $worker.suffix }}, mountPath: /var/cache/paceline}
    {{- end }}
    {{- include "paceline.tlsMount" .root | nindent 4 }}
    {{- include "paceline.redisMount" .root | nindent 4 }}
{{- end }}

{{/* Volumes of one worker; what it writes is its own, also beside another in the pod. */}}
{{- define "paceline.workerVolumes" -}}
{{- $values := .worker.values }}
- name: shm{{ .worker.suffix }}
  emptyDir: {medium: Memory, sizeLimit: {{ $values.shmMib }}Mi}
- name: tmp{{ .worker.suffix }}
  emptyDir: {sizeLimit: 256Mi}
{{- if and $values.tierVolume (not .isClaimed) }}
- name: tier{{ .worker.suffix }}
  {{- toYaml $values.tierVolume | nindent 2 }}
{{- end }}
{{- end }}

{{/* The template of a pod that holds `workers`: values, labels and tiers are those of the pool. */}}
{{- define "paceline.workerPod" -}}
{{- $values := .values }}
metadata:
  labels: {{- include "paceline.podLabels" . | nindent 4 }}
  {{- include "paceline.annotations" . | nindent 2 }}
spec:
  {{- include "paceline.podSecurity" .root | nindent 2 }}
  {{- include "paceline.grace" $values | nindent 2 }}
  {{- include "paceline.placement" (dict "root" .root "values" $values "spread" .labels) | nindent 2 }}
  {{- with $values.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- if eq .role "colocated" }}
  shareProcessNamespace: true # a reader sees the source's processes; both are in one network namespace
  {{- end }}
  {{- with $values.gpuClaimTemplate }}
  resourceClaims: [{name: gpu, resourceClaimTemplateName: {{ . }}}]
  {{- end }}
  {{- if include "paceline.isFetched" .root }}
  initContainers: {{- include "paceline.modelFetch" (dict "root" .root "textOnly" false) | nindent 4 }}
  {{- end }}
  containers:
    {{- range .workers }}
    {{- include "paceline.workerContainer" (dict "root" $.root "worker" . "settleSeconds" $.settleSeconds) | nindent 4 }}
    {{- end }}
  volumes:
    {{- include "paceline.modelVolume" .root | nindent 4 }}
    {{- range .workers }}
    {{- include "paceline.workerVolumes" (dict "worker" . "isClaimed" $.isClaimed) | nindent 4 }}
    {{- end }}
    {{- if and (include "paceline.isFetched" .root) (eq .role "colocated") }}
    - name: tmp
      emptyDir: {sizeLimit: 256Mi}
    {{- end }}
    {{- if .tiers }}
    - name: tiers
      configMap: {name: {{ include "paceline.name" .root }}-{{ .component }}-tiers}
    {{- end }}
    {{- include "paceline.tlsVolume" .root | nindent 4 }}
    {{- include "paceline.redisVolume" .root | nindent 4 }}
{{- end }}

{{- define "paceline.checkPool" -}}
{{- if or (has .name (list "gateway" "redis" "router" "rebalance")) (hasPrefix "router-" .name) }}
{{- fail (printf "pools.%s: a service has this name" .name) }}
{{- end }}
{{- if and (not (has .pool.role (list "colocated" "group"))) (or .pool.prefill .pool.decode) }}
{{- fail (printf "pools.%s: prefill and decode are sides of a pool with the role colocated or group" .name) }}
{{- end }}
{{- end }}

{{- define "paceline.checkWorker" -}}
{{- $where := printf "pools.%s" .name }}
{{- $role := .role }}
{{- $values := .worker.values }}
{{- if and $values.stableNames (eq $role "group") }}
{{- fail (printf "%s.stableNames: workers of a group keep their names anyway" $where) }}
{{- end }}
{{- $device := include "paceline.workerDevice" $values }}
{{- if and $values.tiers (ne $device "cpu") }}
{{- fail (printf "%s.tiers: a pool on a device has no tiers yet" $where) }}
{{- end }}
{{- if and $values.gpus $values.gpuClaimTemplate }}
{{- fail (printf "%s: gpus and gpuClaimTemplate exclude each other" $where) }}
{{- end }}
{{- range $values.tiers }}
{{- if and (eq .kind "object") (not $values.stableNames) (ne $role "group") }}
{{- fail (printf "%s.tiers: kind object finds its pages by the worker's name, so it needs stableNames: true" $where) }}
{{- end }}
{{- if and (eq .kind "file") (not (hasPrefix "/var/cache/paceline" .path)) }}
{{- fail (printf "%s.tiers: path %s is on a read-only file system; the tierVolume is at /var/cache/paceline" $where .path) }}
{{- end }}
{{- if and (eq .kind "file") (not $values.tierVolume) }}
{{- fail (printf "%s.tierVolume: kind file needs a volume" $where) }}
{{- end }}
{{- end }}
{{- end }}
