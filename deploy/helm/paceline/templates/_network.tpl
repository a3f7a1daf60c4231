{{/* Ends of what may be let through. */}}

{{- define "paceline.peer" -}}
{{ include "paceline.labels" (dict "root" .root "component" "") }}
paceline/role: {{ .role }}
{{- end }}

{{- define "paceline.workerPeers" -}}
- podSelector:
    matchLabels: {{- include "paceline.labels" (dict "root" . "component" "") | nindent 6 }}
    matchExpressions:
      - {key: paceline/role, operator: In, values: [prefill, decode, colocated]}
{{- end }}

{{- define "paceline.redisEgress" -}}
{{- if .Values.redis.external.host }}
- ports: [{port: {{ .Values.redis.external.port }}}]
{{- else }}
- to:
    - podSelector:
        matchLabels: {{- include "paceline.peer" (dict "root" . "role" "redis") | nindent 10 }}
  ports: [{port: 6379}]
{{- end }}
{{- end }}
