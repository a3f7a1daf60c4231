{{- define "paceline.name" -}}
{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "paceline.labels" -}}
app.kubernetes.io/name: paceline
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "paceline.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "paceline.secret" -}}
{{ .Values.secret.existing | default (include "paceline.name" .) }}
{{- end }}

{{/* Helm keeps numbers as floats: 2097152, not 2.097152e+06. */}}
{{- define "paceline.text" -}}
{{- if and (kindIs "float64" .) (eq (float64 (int64 .)) .) }}{{ int64 . }}{{ else }}{{ . }}{{ end }}
{{- end }}

{{/* Environment of a service: the deployment's secret, then `settings` by their variables' names. */}}
{{- define "paceline.environment" -}}
- name: {{ .prefix }}SECRET
  valueFrom:
    secretKeyRef: {name: {{ include "paceline.secret" .root }}, key: secret}
{{- range $name, $value := .settings }}
- name: {{ $.prefix }}{{ upper $name }}
  value: {{ include "paceline.text" $value | quote }}
{{- end }}
{{- end }}

{{/* Redis: the password comes before the URL that names it. */}}
{{- define "paceline.redis" -}}
{{- if .root.Values.redis.url }}
- name: {{ .prefix }}REDIS_URL
  value: {{ .root.Values.redis.url | quote }}
{{- else }}
- name: REDIS_PASSWORD
  valueFrom:
    secretKeyRef: {name: {{ include "paceline.secret" .root }}, key: redis-password}
- name: {{ .prefix }}REDIS_URL
  value: redis://:$(REDIS_PASSWORD)@{{ include "paceline.name" .root }}-redis:6379
{{- end }}
{{- end }}

{{/* Liveness begins when the startup probe has passed: its budget is the whole loading time. */}}
{{- define "paceline.probes" -}}
startupProbe:
  httpGet: {path: /readyz, port: {{ .port }}}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: {{ div (add .loadSeconds 4) 5 }}
livenessProbe:
  httpGet: {path: /livez, port: {{ .port }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /readyz, port: {{ .port }}}
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: 2
{{- end }}

{{- define "paceline.podSecurity" -}}
automountServiceAccountToken: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "paceline.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{/* New requests go elsewhere for 5 s before SIGTERM starts the drain. */}}
{{- define "paceline.preStop" -}}
lifecycle:
  preStop:
    sleep: {seconds: 5}
{{- end }}

{{- define "paceline.grace" -}}
terminationGracePeriodSeconds: {{ add 5 .drainSeconds 15 }}
{{- end }}

{{/* A worker of either role: prefill.yaml and decode.yaml. */}}
{{- define "paceline.worker" -}}
{{- $values := index .root.Values .role }}
{{- $name := printf "%s-%s" (include "paceline.name" .root) .role }}
{{- $labels := include "paceline.labels" (dict "root" .root "component" .role) }}
{{- $device := ternary "cuda" "cpu" (gt (int $values.gpus) 0) }}
{{- $pool := ternary 0 $values.poolMib (gt (int $values.gpus) 0) }}
{{- $settings := dict "host" "0.0.0.0" "port" 9200 "probe_port" 9201 "device" $device }}
{{- $settings = merge $settings (dict "model" .root.Values.model.path "pool_mib" $values.poolMib) }}
{{- $settings = merge $settings (dict "run_dir" "/tmp" "drain_timeout_s" $values.drainSeconds) }}
{{- if .root.Values.model.name }}
{{- $settings = merge $settings (dict "model_name" .root.Values.model.name) }}
{{- end }}
{{- $settings = merge (deepCopy $values.settings) $settings }}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ $name }}
  labels: {{- $labels | nindent 4 }}
spec:
  replicas: {{ $values.replicas }}
  selector:
    matchLabels: {{- $labels | nindent 6 }}
  template:
    metadata:
      labels: {{- $labels | nindent 8 }}
    spec:
      {{- include "paceline.podSecurity" . | nindent 6 }}
      {{- include "paceline.grace" $values | nindent 6 }}
      {{- with $values.nodeSelector }}
      nodeSelector: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $values.tolerations }}
      tolerations: {{- toYaml . | nindent 8 }}
      {{- end }}
      containers:
        - name: {{ .role }}
          image: {{ include "paceline.image" .root }}
          imagePullPolicy: {{ .root.Values.image.pullPolicy }}
          args: [{{ .role }}]
          env:
            - name: PACELINE_WORKER_WORKER_ID
              valueFrom:
                fieldRef: {fieldPath: metadata.name}
            - name: PACELINE_WORKER_ADVERTISE_HOST
              valueFrom:
                fieldRef: {fieldPath: status.podIP}
            - {name: HOME, value: /tmp} # caches of compiled kernels; the root is read-only
            {{- $context := dict "root" .root "prefix" "PACELINE_WORKER_" "settings" $settings }}
            {{- include "paceline.environment" $context | nindent 12 }}
            {{- include "paceline.redis" $context | nindent 12 }}
          ports:
            - {name: grpc, containerPort: 9200}
            - {name: probes, containerPort: 9201}
          {{- $probes := dict "port" "probes" "loadSeconds" $values.loadSeconds }}
          {{- include "paceline.probes" $probes | nindent 10 }}
          {{- include "paceline.preStop" . | nindent 10 }}
          {{- include "paceline.containerSecurity" . | nindent 10 }}
          resources:
            requests:
              cpu: {{ $values.cpu | quote }}
              memory: {{ add $values.memoryMib $pool $values.shmMib }}Mi
            limits:
              memory: {{ add $values.memoryMib $pool $values.shmMib }}Mi
              {{- if $values.gpus }}
              nvidia.com/gpu: {{ $values.gpus }}
              {{- end }}
          volumeMounts:
            - {name: models, mountPath: /models, readOnly: true}
            - {name: shm, mountPath: /dev/shm}
            - {name: tmp, mountPath: /tmp}
      volumes:
        - name: models
          {{- toYaml .root.Values.model.volume | nindent 10 }}
        - name: shm
          emptyDir: {medium: Memory, sizeLimit: {{ $values.shmMib }}Mi}
        - name: tmp
          emptyDir: {sizeLimit: 256Mi}
{{- end }}
