{{- define "paceline.name" -}}
{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- end }}

{{/* What selects the pods of a component. A Deployment's selector cannot change: neither can this. */}}
{{- define "paceline.labels" -}}
app.kubernetes.io/name: paceline
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end }}

{{- define "paceline.metadata" -}}
name: {{ .name }}
labels: {{- include "paceline.labels" . | nindent 2 }}
  app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
  app.kubernetes.io/managed-by: {{ .root.Release.Service }}
  helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{- define "paceline.podLabels" -}}
{{ include "paceline.labels" . }}
paceline/role: {{ .role }}
{{- end }}

{{/* `target` of deploy/docker/Dockerfile: front, cpu or cuda. */}}
{{- define "paceline.image" -}}
{{- $image := .root.Values.image }}
{{- $digest := get $image.digests .target }}
{{- if $digest }}
{{- printf "%s@%s" $image.repository $digest }}
{{- else }}
{{- printf "%s:%s-%s" $image.repository ($image.tag | default .root.Chart.AppVersion) .target }}
{{- end }}
{{- end }}

{{- define "paceline.secret" -}}
{{ .Values.secret.existing | default (include "paceline.name" .) }}
{{- end }}

{{- define "paceline.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (include "paceline.name" .) }}
{{- end }}

{{/* Helm keeps numbers as floats: 2097152, not 2.097152e+06. */}}
{{- define "paceline.text" -}}
{{- if kindIs "slice" . }}{{ join "," . }}
{{- else if and (kindIs "float64" .) (eq (float64 (int64 .)) .) }}{{ int64 . }}
{{- else }}{{ . }}{{ end }}
{{- end }}

{{/* The second map over the first, as JSON: also where it says 0, false or "". */}}
{{- define "paceline.overlay" -}}
{{- $out := deepCopy (index . 0) }}
{{- range $key, $value := index . 1 }}
{{- $below := get $out $key }}
{{- $isOpen := has $key (list "volume" "tierVolume" "affinity" "nodeSelector") }}
{{- if and (kindIs "map" $value) (kindIs "map" $below) (not $isOpen) }}
{{- $value = include "paceline.overlay" (list $below $value) | fromJson }}
{{- end }}
{{- $_ := set $out $key $value }}
{{- end }}
{{- toJson $out }}
{{- end }}

{{/* Environment of a service: the deployment's secret, `settings` by their variables' names, TLS. */}}
{{- define "paceline.environment" -}}
- name: {{ .prefix }}SECRET
  valueFrom:
    secretKeyRef: {name: {{ include "paceline.secret" .root }}, key: secret}
{{- range $name, $value := .settings }}
- name: {{ $.prefix }}{{ upper $name }}
  value: {{ include "paceline.text" $value | quote }}
{{- end }}
{{- include "paceline.tlsEnvironment" .root }}
{{- end }}

{{/* Name of the Secret with the services' certificate; empty without TLS. */}}
{{- define "paceline.tlsSecret" -}}
{{- with .Values.tls }}
{{- if and .existing .issuer.name }}
{{- fail "tls: existing and issuer.name exclude each other" }}
{{- end }}
{{- if and .required (not .existing) (not .issuer.name) }}
{{- fail "tls.required: needs tls.existing or tls.issuer.name" }}
{{- end }}
{{- .existing | default (ternary (printf "%s-tls" (include "paceline.name" $)) "" (not (empty .issuer.name))) }}
{{- end }}
{{- end }}

{{- define "paceline.tlsEnvironment" -}}
{{- if include "paceline.tlsSecret" . }}
- {name: PACELINE_TLS_CA, value: /etc/paceline/tls/ca.crt}
- {name: PACELINE_TLS_CERT, value: /etc/paceline/tls/tls.crt}
- {name: PACELINE_TLS_KEY, value: /etc/paceline/tls/tls.key}
- {name: PACELINE_TLS_NAME, value: {{ .Values.tls.name }}}
- {name: PACELINE_TLS_ENCRYPTION, value: {{ ternary "required" "auto" .Values.tls.required }}}
- {name: PACELINE_TLS_FABRIC_ENCRYPTED, value: {{ .Values.tls.fabricEncrypted | quote }}}
{{- end }}
{{- end }}

{{- define "paceline.tlsMount" -}}
{{- if include "paceline.tlsSecret" . }}
- {name: tls, mountPath: /etc/paceline/tls, readOnly: true}
{{- end }}
{{- end }}

{{/* Mounted whole, it is renewed in the pod; the pod's group reads it. */}}
{{- define "paceline.tlsVolume" -}}
{{- with include "paceline.tlsSecret" . }}
- name: tls
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- end }}

{{/* Redis: the password comes before the URL that names it. */}}
{{- define "paceline.redis" -}}
{{- $external := .root.Values.redis.external }}
{{- $secret := include "paceline.secret" .root }}
{{- $key := "redis-password" }}
{{- if $external.host }}
{{- $secret = $external.passwordSecret }}
{{- $key = "password" }}
{{- end }}
{{- if $secret }}
- name: REDIS_PASSWORD
  valueFrom:
    secretKeyRef: {name: {{ $secret }}, key: {{ $key }}}
{{- end }}
- name: {{ .prefix }}REDIS_URL
  value: {{ include "paceline.redisUrl" (dict "root" .root "hasPassword" (not (empty $secret))) }}
{{- end }}

{{- define "paceline.redisUrl" -}}
{{- $external := .root.Values.redis.external }}
{{- $login := ternary ":$(REDIS_PASSWORD)@" "" .hasPassword }}
{{- if $external.host }}
{{- $scheme := ternary "rediss" "redis" $external.tls }}
{{- $query := ternary "?ssl_ca_certs=/etc/paceline/redis/ca.crt" "" (and $external.tls (not (empty $external.caSecret))) }}
{{- printf "%s://%s%s%s:%d/%d%s" $scheme $external.username $login $external.host (int $external.port) (int $external.database) $query }}
{{- else }}
{{- printf "redis://%s%s-redis:6379" $login (include "paceline.name" .root) }}
{{- end }}
{{- end }}

{{- define "paceline.redisMount" -}}
{{- with .Values.redis.external }}
{{- if and .host .tls .caSecret }}
- {name: redis-ca, mountPath: /etc/paceline/redis, readOnly: true}
{{- end }}
{{- end }}
{{- end }}

{{- define "paceline.redisVolume" -}}
{{- with .Values.redis.external }}
{{- if and .host .tls .caSecret }}
- name: redis-ca
  secret: {secretName: {{ .caSecret }}}
{{- end }}
{{- end }}
{{- end }}

{{/* Liveness begins when the startup probe has passed: its budget is the whole starting time. */}}
{{- define "paceline.probes" -}}
startupProbe:
  httpGet: {path: {{ .startup }}, port: {{ .port }}}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: {{ div (add .startSeconds 4) 5 }}
livenessProbe:
  httpGet: {path: /livez, port: {{ .port }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /readyz, port: {{ .port }}}
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: {{ .unready | default 2 }}
  {{- with .settleSeconds }}
  successThreshold: {{ div . 2 }} # who lets an old pod go for this one waits until routers have found it
  {{- end }}
{{- end }}

{{/* Front doors serve once they listen; whether there is somebody to serve is for /readyz. Requests wait
     in the router for a worker that starts again: ten seconds without one turn no client away. */}}
{{- define "paceline.frontProbes" -}}
{{- include "paceline.probes" (dict "port" . "startup" "/livez" "startSeconds" 120 "unready" 5) }}
{{- end }}

{{- define "paceline.podSecurity" -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "paceline.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{/* Endpoints forget the pod before SIGTERM starts the drain: new connections go elsewhere. */}}
{{- define "paceline.preStop" -}}
lifecycle:
  preStop:
    exec: {command: [sleep, "5"]} # preStop.sleep is unknown before Kubernetes 1.30
{{- end }}

{{/* preStop, drain, and time to end what the drain has not. */}}
{{- define "paceline.grace" -}}
terminationGracePeriodSeconds: {{ add 5 .drainSeconds 15 }}
{{- end }}

{{- define "paceline.checkStrategy" -}}
{{- with .strategy }}
{{- if and (eq (toString .maxSurge) "0") (eq (toString .maxUnavailable) "0") }}
{{- fail "strategy: maxSurge and maxUnavailable are both 0: no pod could ever be replaced" }}
{{- end }}
{{- end }}
{{- end }}

{{- define "paceline.strategy" -}}
{{- include "paceline.checkStrategy" . }}
strategy:
  type: RollingUpdate
  rollingUpdate: {maxSurge: {{ .strategy.maxSurge }}, maxUnavailable: {{ .strategy.maxUnavailable }}}
{{- end }}

{{- define "paceline.pullSecrets" }}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Where pods run. `spread` selects those that are spread. */}}
{{- define "paceline.placement" -}}
serviceAccountName: {{ include "paceline.serviceAccount" .root }}
{{- include "paceline.pullSecrets" .root }}
{{- with .values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- $soft := dict "maxSkew" 1 "topologyKey" "kubernetes.io/hostname" "whenUnsatisfiable" "ScheduleAnyway" }}
topologySpreadConstraints:
  {{- range .values.topologySpread | default (list $soft) }}
  - {{- toYaml . | nindent 4 }}
    labelSelector:
      matchLabels: {{- $.spread | nindent 8 }}
  {{- end }}
{{- end }}

{{/* Pods restart when what they read at their start has changed. */}}
{{- define "paceline.annotations" -}}
{{- $all := dict }}
{{- range $key, $value := .values.podAnnotations }}
{{- $_ := set $all $key $value }}
{{- end }}
{{- range $key, $value := .more | default dict }}
{{- $_ := set $all $key $value }}
{{- end }}
{{- with $all }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* One Deployment and Service a router: gateways go to them in this order. */}}
{{- define "paceline.routerComponent" -}}
{{ ternary "router" (printf "router-%d" (add1 .)) (eq (int .) 0) }}
{{- end }}
