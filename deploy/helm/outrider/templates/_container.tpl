{{/* The container of a role's process: dict "root" $ "role" "router". */}}
{{- define "outrider.container" -}}
{{- $values := get .root.Values .role -}}
{{- $router := eq .role "router" -}}
{{- $process := include "outrider.process" . | fromYaml -}}
{{- $own := $process.suffix -}}
{{- $journal := $router | ternary .root.Values.router.journal.volume "" -}}
- name: {{ .role }}
  image: {{ include "outrider.image" . }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  args:
    - --config
    - /etc/outrider{{ $own }}/{{ .role }}.toml
    {{- if not $router }}
    - --{{ .role }}-id
    - $(POD_NAME)
    {{- end }}
    {{- if .root.Values.tls.enabled }}
    - --tls-cert=/etc/outrider{{ $own }}-tls/tls.crt
    - --tls-key=/etc/outrider{{ $own }}-tls/tls.key
    - --tls-ca=/etc/outrider{{ $own }}-tls/ca.crt
    {{- end }}
    {{- if and $router .root.Values.apiKeys.existingSecret }}
    - --api-keys=/etc/outrider-keys/keys.toml
    {{- end }}
    {{- if $journal }}
    - --journal=/journal/router.log
    {{- end }}
  env:
    - name: POD_NAME
      valueFrom: {fieldRef: {fieldPath: metadata.name}}
    # Processes that serve never download: /models is read-only for them.
    - {name: HF_HUB_OFFLINE, value: "1"}
    {{- with $values.extraEnv }}{{ toYaml . | nindent 4 }}{{ end }}
  {{- with $values.extraEnvFrom }}
  envFrom: {{ toYaml . | nindent 4 }}
  {{- end }}
  ports:
    - {name: {{ $process.grpcName }}, containerPort: {{ $process.port }}}
    {{- if $router }}
    - {name: http, containerPort: 8000}
    {{- end }}
    - {name: {{ $process.metricsName }}, containerPort: {{ $process.metrics }}}
  {{- if $router }}
  lifecycle:
    preStop:
      sleep: {seconds: {{ $values.preStopSeconds }}}
  {{- end }}
  {{- include "outrider.probes" . | nindent 2 }}
  resources: {{ toYaml $values.resources | nindent 4 }}
  securityContext: {{ include "outrider.securityContext" . | nindent 4 }}
  volumeMounts:
    - {name: config{{ $own }}, mountPath: /etc/outrider{{ $own }}, readOnly: true}
    - {name: models, mountPath: /models, readOnly: true}
    - {name: tmp, mountPath: /tmp}
    {{- if $journal }}
    - {name: journal, mountPath: /journal}
    {{- end }}
    {{- if not $router }}
    - {name: shm, mountPath: /dev/shm}
    {{- end }}
    {{- if .root.Values.tls.enabled }}
    - {name: tls{{ $own }}, mountPath: /etc/outrider{{ $own }}-tls, readOnly: true}
    {{- end }}
    {{- if and $router .root.Values.apiKeys.existingSecret }}
    - {name: keys, mountPath: /etc/outrider-keys, readOnly: true}
    {{- end }}
    {{- with $values.extraVolumeMounts }}{{ toYaml . | nindent 4 }}{{ end }}
{{- end -}}

{{- define "outrider.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* The kubelet's gRPC probes do not support TLS: with TLS, most probes check only that the port is open. */}}
{{- define "outrider.probes" -}}
{{- $values := get .root.Values .role -}}
{{- $router := eq .role "router" -}}
{{- $process := include "outrider.process" . | fromYaml -}}
{{- $alive := dict "grpc" (dict "port" $process.port "service" "grpc.health.v1.Health") -}}
{{- $serves := dict "grpc" (dict "port" $process.port "service" $process.service) -}}
{{- if .root.Values.tls.enabled -}}
{{- $alive = dict "tcpSocket" (dict "port" $process.grpcName) -}}
{{- $serves = $router | ternary (dict "httpGet" (dict "path" "/health" "port" "http" "scheme" "HTTPS")) $alive -}}
{{- end -}}
# The port of a {{ .role }} opens when it {{ $router | ternary "has read its journal" "has loaded its model and warmed up" }}.
startupProbe:
  {{- toYaml ($router | ternary $alive $serves) | nindent 2 }}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: {{ div (default 120 $values.startupSeconds) 5 }}
readinessProbe:
  {{- toYaml $serves | nindent 2 }}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: 2
livenessProbe:
  {{- toYaml $alive | nindent 2 }}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end -}}
