{{- define "probingd.name" -}}
{{ default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "probingd.fullname" -}}
{{- $name := include "probingd.name" . -}}
{{- if contains $name .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-{{ $name }}{{ end -}}
{{- end }}

{{- define "probingd.selector" -}}
app.kubernetes.io/name: {{ include "probingd.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "probingd.labels" -}}
{{ include "probingd.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "probingd.image" -}}
{{ .Values.image.repository }}
{{- if .Values.image.digest }}@{{ .Values.image.digest }}{{ else }}:{{ default .Chart.AppVersion .Values.image.tag }}{{ end }}
{{- end }}

{{- /* The file of the configuration. JSON of texts, numbers and lists is TOML as well. */ -}}
{{- define "probingd.toml" -}}
{{- range $key, $value := .Values.config }}
{{- if not (kindIs "map" $value) }}
{{ $key }} = {{ toJson $value }}
{{- end }}
{{- end }}
{{- range $section, $values := .Values.config }}
{{- if kindIs "map" $values }}

[{{ $section }}]
{{- range $key, $value := $values }}
{{ $key }} = {{ toJson $value }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "probingd.tokenSecret" -}}
{{- if .Values.token.value }}{{ include "probingd.fullname" . }}-token{{ else }}{{ .Values.token.secretName }}{{ end }}
{{- end }}

{{- define "probingd.tls" -}}
{{- if or .Values.tls.secretName .Values.tls.volume }}yes{{ end }}
{{- end }}

{{- define "probingd.priorityClass" -}}
{{- if .Values.priorityClass.create }}{{ include "probingd.fullname" . }}{{ else }}{{ .Values.priorityClass.name }}{{ end }}
{{- end }}

{{- /* Values that contradict each other: the daemon would refuse them on each node. */ -}}
{{- define "probingd.check" -}}
{{- $tcp := or .Values.listen.enabled .Values.metrics.enabled }}
{{- $tls := include "probingd.tls" . }}
{{- $known := or (include "probingd.tokenSecret" .) (and $tls .Values.tls.clientCa) }}
{{- if and $tcp (not .Values.insecure) (not $known) }}
{{- fail "listen and metrics would answer everybody: set token, or tls with tls.clientCa, or insecure: true where everybody may read" }}
{{- end }}
{{- if and $tcp (not .Values.insecure) (not $tls) }}
{{- fail "listen and metrics would answer in the clear: set tls.secretName or tls.volume, or insecure: true where the network is trusted" }}
{{- end }}
{{- if and .Values.token.secretName .Values.token.value }}
{{- fail "token.secretName and token.value exclude each other" }}
{{- end }}
{{- if and .Values.tls.secretName .Values.tls.volume }}
{{- fail "tls.secretName and tls.volume exclude each other" }}
{{- end }}
{{- if and .Values.networkPolicy.enabled .Values.hostNetwork }}
{{- fail "a NetworkPolicy has no effect on pods with the node's network: set hostNetwork: false, or networkPolicy.enabled: false" }}
{{- end }}
{{- if and .Values.metrics.serviceMonitor.enabled (not .Values.metrics.enabled) }}
{{- fail "metrics.serviceMonitor takes metrics.enabled: true" }}
{{- end }}
{{- end }}
