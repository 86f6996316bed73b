{{- define "outrider.name" -}}
{{- if contains "outrider" .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-outrider" .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* What selects the pods of a role: dict "root" $ "role" "router". Never changes in an upgrade. */}}
{{- define "outrider.selector" -}}
app.kubernetes.io/name: outrider
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .role }}
{{- end -}}

{{- define "outrider.labels" -}}
{{ include "outrider.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{- define "outrider.image" -}}
{{ printf "%soutrider-%s:%s" .root.Values.image.prefix .role (default .root.Chart.AppVersion .root.Values.image.tag) }}
{{- end -}}

{{/* A TOML value. Helm's numbers are floats, and toToml writes 256.0 where an integer is wanted. */}}
{{- define "outrider.toml" -}}
{{- if kindIs "map" . -}}
{ {{- $first := true }}
{{- range $key, $value := . }}{{ if not $first }},{{ end }} {{ toJson $key }} = {{ include "outrider.toml" $value }}{{ $first = false }}{{ end }} }
{{- else if kindIs "slice" . -}}
[{{ range $i, $value := . }}{{ if $i }}, {{ end }}{{ include "outrider.toml" $value }}{{ end }}]
{{- else if kindIs "float64" . -}}
{{ if eq (floor .) . }}{{ printf "%.0f" . }}{{ else }}{{ toJson . }}{{ end }}
{{- else if kindIs "string" . -}}
{{ toJson . }}
{{- else -}}
{{ . }}
{{- end -}}
{{- end -}}

{{/* A process's TOML file: what the chart sets wins over what was given. */}}
{{- define "outrider.config" -}}
{{- $name := include "outrider.name" .root -}}
{{- $given := deepCopy (get .root.Values .role).config -}}
{{- $set := dict "metrics_host" "0.0.0.0" -}}
{{- if eq .role "router" -}}
{{- $set = merge $set (dict "listen" "0.0.0.0:50050" "http" "0.0.0.0:8000" "metrics_port" 9100) -}}
{{- $peers := dict "verifiers" (list (printf "dns:///%s-verifier:50051" $name)) "drafters" (list (printf "dns:///%s-drafter:50052" $name)) -}}
{{- $given = merge $given $peers -}}
{{- else if eq .role "verifier" -}}
{{- $set = merge $set (dict "listen" "0.0.0.0:50051" "metrics_port" 9101) -}}
{{- else -}}
{{- $set = merge $set (dict "listen" "0.0.0.0:50052" "metrics_port" 9102) -}}
{{- end -}}
{{- range $key, $value := mergeOverwrite $given $set }}
{{- if not (kindIs "invalid" $value) }}
{{ $key }} = {{ include "outrider.toml" $value }}
{{- end }}
{{- end }}
{{- end -}}
