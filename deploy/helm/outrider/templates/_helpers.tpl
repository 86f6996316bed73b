{{- define "outrider.name" -}}
{{- if contains "outrider" .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-outrider" .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Labels that select the pods of a role: dict "root" $ "role" "router". They never change in an upgrade. */}}
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

{{/* Properties of a role's processes, as YAML. podRole is the role of the pods that contain them. A drafter in
a verifier's pod has other port names, and a suffix for its volumes and paths. */}}
{{- define "outrider.process" -}}
{{- $second := and (eq .role "drafter") .root.Values.drafter.inVerifierPod -}}
podRole: {{ $second | ternary "verifier" .role }}
suffix: {{ $second | ternary "-drafter" "" | quote }}
grpcName: {{ $second | ternary "drafter" "grpc" }}
metricsName: {{ $second | ternary "metrics-draft" "metrics" }}
port: {{ get (dict "router" 50050 "verifier" 50051 "drafter" 50052) .role }}
metrics: {{ get (dict "router" 9100 "verifier" 9101 "drafter" 9102) .role }}
service: outrider.wire.v1.{{ eq .role "router" | ternary "Inference" (title .role) }}Service
{{- end -}}

{{/* Not empty if the role has pods of its own. */}}
{{- define "outrider.hasPods" -}}
{{- if eq .role (include "outrider.process" . | fromYaml).podRole -}}
yes
{{- end -}}
{{- end -}}

{{/* Labels that select the pods with the processes of a role. */}}
{{- define "outrider.holders" -}}
{{ include "outrider.selector" (dict "root" .root "role" (include "outrider.process" . | fromYaml).podRole) }}
{{- end -}}

{{/* Not empty if the role has an autoscaler. Drafters without pods of their own have none. */}}
{{- define "outrider.scaled" -}}
{{- if and .root.Values.autoscaling.by (get .root.Values .role).replicas (include "outrider.hasPods" .) -}}
yes
{{- end -}}
{{- end -}}

{{/* The label of pods that download a model: with a shared volume this is only the Job. */}}
{{- define "outrider.fetches" -}}
{{- $self := or (eq .role "models") (not .root.Values.models.persistence.enabled) -}}
outrider.io/fetches-models: {{ if and .root.Values.models.pull $self }}"true"{{ else }}"false"{{ end }}
{{- end -}}

{{/* The container that downloads a model, or for a router only the tokenizer: dict "root" $ "role" "router". */}}
{{- define "outrider.models" -}}
{{- $models := .root.Values.models -}}
{{- $router := eq .role "router" -}}
{{- $env := $models.extraEnv -}}
{{- if and $models.persistence.enabled (ne .role "models") -}}
{{- /* The Job downloads. Until a hub model is in the volume, this container fails and is restarted. */ -}}
{{- $env = prepend $env (dict "name" "HF_HUB_OFFLINE" "value" "1") -}}
{{- else if $models.hubToken.existingSecret -}}
{{- $secret := dict "name" $models.hubToken.existingSecret "key" $models.hubToken.key -}}
{{- $env = prepend $env (dict "name" "HF_TOKEN" "valueFrom" (dict "secretKeyRef" $secret)) -}}
{{- end -}}
- name: models
  image: {{ include "outrider.image" (dict "root" .root "role" ($router | ternary "router" "verifier")) }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  command: [outrider, models, pull, {{ if $router }}--tokenizer-only, {{ end }}{{ $models.pull | quote }}]
  {{- with $env }}
  env: {{ toYaml . | nindent 4 }}
  {{- end }}
  resources: {{ toYaml ($router | ternary $models.tokenizerResources $models.resources) | nindent 4 }}
  securityContext: {{ include "outrider.securityContext" . | nindent 4 }}
  volumeMounts:
    - {name: models, mountPath: /models}
    - {name: tmp, mountPath: /tmp}
{{- end -}}

{{- define "outrider.claim" -}}
{{ default (printf "%s-models" (include "outrider.name" .root)) .root.Values.models.persistence.existingClaim }}
{{- end -}}

{{- define "outrider.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "outrider.image" -}}
{{- $name := printf "%soutrider-%s" .root.Values.image.prefix .role -}}
{{- with get .root.Values.image.digests .role -}}
{{ $name }}@{{ . }}
{{- else -}}
{{ $name }}:{{ default .root.Chart.AppVersion .root.Values.image.tag }}
{{- end -}}
{{- end -}}

{{/* A TOML value. Helm's numbers are floats, and toToml would write the integer 256 as 256.0. */}}
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

{{/* A process's TOML file. Keys that the chart sets take precedence over the values. */}}
{{- define "outrider.config" -}}
{{- $name := include "outrider.name" .root -}}
{{- $given := deepCopy (get .root.Values .role).config -}}
{{- $set := dict "metrics_host" "0.0.0.0" -}}
{{- if eq .role "router" -}}
{{- $set = merge $set (dict "listen" "0.0.0.0:50050" "http" "0.0.0.0:8000" "metrics_port" 9100) -}}
{{- $peers := dict "verifiers" (list (printf "dns:///%s-verifier:50051" $name)) "drafters" (list (printf "dns:///%s-drafter:50052" $name)) -}}
{{- $peers = set $peers "routers" (list (printf "dns:///%s-routers:50050" $name)) -}}
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

{{/* Not empty if two parentRefs, "a" and "b", may be the same listener. A missing field matches everything. */}}
{{- define "outrider.sameListener" -}}
{{- $space := .root.Release.Namespace -}}
{{- $apart := or (ne .a.name .b.name) (ne (default $space .a.namespace) (default $space .b.namespace)) -}}
{{- range $key := list "sectionName" "port" -}}
{{- $a := get $.a $key -}}
{{- $b := get $.b $key -}}
{{- if and $a $b (ne (toString $a) (toString $b)) -}}{{- $apart = true -}}{{- end -}}
{{- end -}}
{{- if not $apart -}}
yes
{{- end -}}
{{- end -}}

{{/* Not empty if a name can match both hostnames, "a" and "b"; "" matches every name. */}}
{{- define "outrider.hostnamesMeet" -}}
{{- $wide := or (not .a) (not .b) (eq .a .b) -}}
{{- $wider := and (hasPrefix "*." .a) (hasSuffix (trimPrefix "*" .a) .b) -}}
{{- if or $wide $wider (and (hasPrefix "*." .b) (hasSuffix (trimPrefix "*" .b) .a)) -}}
yes
{{- end -}}
{{- end -}}
