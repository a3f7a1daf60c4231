{{/* Where a model comes from: a volume, and what fills it. */}}

{{- define "paceline.isFetched" -}}
{{- with .Values.model.fetch }}
{{- if or .huggingFace .image }}yes{{ end }}
{{- end }}
{{- end }}

{{- define "paceline.modelVolume" -}}
{{- $claim := dict "persistentVolumeClaim" (dict "claimName" "paceline-models") }}
- name: models
  {{- toYaml (.Values.model.volume | default $claim) | nindent 2 }}
{{- if and (include "paceline.isFetched" .) .Values.model.fetch.sha256 }}
- name: digests
  configMap: {name: {{ include "paceline.name" . }}-model}
{{- end }}
{{- end }}

{{/* Lines for sha256sum, of all files or (`textOnly`) of those that gateways fetch. */}}
{{- define "paceline.digests" -}}
{{- $textOnly := and .textOnly (not (empty .root.Values.model.fetch.huggingFace)) }}
{{- range $file, $digest := .root.Values.model.fetch.sha256 }}
{{- if or (not $textOnly) (hasSuffix ".json" $file) (hasSuffix ".jinja" $file) }}
{{ $digest }}  {{ $file }}
{{- end }}
{{- end }}
{{- end }}

{{/* Init containers: one that downloads, then one that compares digests. Both print each file.
     Gateways (`textOnly`) leave the weights out where the client can. */}}
{{- define "paceline.modelFetch" -}}
{{- $fetch := .root.Values.model.fetch }}
{{- $path := .root.Values.model.path }}
{{- $ours := include "paceline.image" (dict "root" .root "target" "front") }}
{{- if include "paceline.isFetched" .root }}
{{- $volume := .root.Values.model.volume }}
{{- if not (or (hasKey $volume "emptyDir") (hasKey $volume "ephemeral")) }}
{{- fail "model.fetch needs model.volume.emptyDir or model.volume.ephemeral: pods that share a volume would all write it" }}
{{- end }}
- name: fetch
  image: {{ $fetch.image | default $ours }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  {{- if $fetch.huggingFace }}
  command:
    - hf
    - download
    - {{ $fetch.huggingFace }}
    - --revision
    - {{ $fetch.revision | quote }}
    - --local-dir
    - {{ $path }}
    {{- if .textOnly }}
    - --include
    - "*.json"
    - --include
    - "*.jinja"
    {{- end }}
  {{- else }}
  command: {{- toYaml $fetch.command | nindent 4 }}
  {{- end }}
  env:
    - {name: HOME, value: /tmp}
    {{- if $fetch.huggingFace }}
    - {name: HF_HOME, value: /models/.huggingface} # its caches outgrow /tmp
    {{- end }}
    {{- if and $fetch.huggingFace $fetch.tokenSecret }}
    - name: HF_TOKEN
      valueFrom:
        secretKeyRef: {name: {{ $fetch.tokenSecret }}, key: token}
    {{- end }}
    {{- range $name, $value := $fetch.env }}
    - {name: {{ $name }}, value: {{ $value | quote }}}
    {{- end }}
  {{- with $fetch.secret }}
  envFrom:
    - secretRef: {name: {{ . }}}
  {{- end }}
  {{- include "paceline.containerSecurity" . | nindent 2 }}
  resources:
    requests: {cpu: 500m, memory: 1Gi}
    limits: {memory: 4Gi}
  volumeMounts:
    - {name: models, mountPath: /models}
    - {name: tmp, mountPath: /tmp}
{{- $sums := ternary "TEXTSUMS" "SHA256SUMS" .textOnly }}
{{- if include "paceline.digests" . }}
- name: verify
  image: {{ $ours }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  command: [sha256sum, --check, --strict, /etc/paceline/model/{{ $sums }}]
  workingDir: {{ $path }}
  {{- include "paceline.containerSecurity" . | nindent 2 }}
  resources:
    requests: {cpu: 500m, memory: 64Mi}
    limits: {memory: 256Mi}
  volumeMounts:
    - {name: models, mountPath: /models, readOnly: true}
    - {name: digests, mountPath: /etc/paceline/model, readOnly: true}
{{- end }}
{{- end }}
{{- end }}
