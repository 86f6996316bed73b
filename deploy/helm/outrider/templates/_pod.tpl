{{/* The pod template of a role: dict "root" $ "role" "router" "port" 50050 "service" NAME. */}}
{{- define "outrider.pod" -}}
{{- $values := get .root.Values .role -}}
{{- $name := include "outrider.name" .root -}}
{{- $router := eq .role "router" -}}
metadata:
  labels:
    {{- include "outrider.selector" . | nindent 4 }}
    {{- include "outrider.fetches" . | nindent 4 }}
    {{- with $values.podLabels }}{{ toYaml . | nindent 4 }}{{ end }}
  annotations:
    # A change of the configuration rolls the pods.
    outrider.io/config: {{ include "outrider.config" . | sha256sum }}
    {{- with $values.podAnnotations }}{{ toYaml . | nindent 4 }}{{ end }}
spec:
  serviceAccountName: {{ $name }}-{{ .role }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  {{- with .root.Values.imagePullSecrets }}
  imagePullSecrets: {{ toYaml . | nindent 4 }}
  {{- end }}
  # preStop, drain_timeout_s and 10 s for what is left to close.
  {{- $drain := default (dict "router" 30 "verifier" 20 "drafter" 10 | dig .role 0) $values.config.drain_timeout_s }}
  terminationGracePeriodSeconds: {{ add (ceil $drain) (default 0 $values.preStopSeconds) 10 }}
  securityContext: {{ include "outrider.podSecurityContext" . | nindent 4 }}
  {{- with $values.nodeSelector }}
  nodeSelector: {{ toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.tolerations }}
  tolerations: {{ toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with $values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with $values.affinity }}
  affinity: {{ toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.topologySpreadConstraints }}
  topologySpreadConstraints: {{ toYaml . | nindent 4 }}
  {{- end }}
  {{- if not (eq .role "drafter" | ternary $values.affinity $values.topologySpreadConstraints) }}
  {{- include "outrider.placement" . | nindent 2 }}
  {{- end }}
  {{- if .root.Values.models.pull }}
  initContainers:
    # Fetches and converts once, before any probe begins to count; or finds what the Job has fetched.
    {{- include "outrider.models" . | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ .role }}
      image: {{ include "outrider.image" . }}
      imagePullPolicy: {{ .root.Values.image.pullPolicy }}
      args:
        - --config
        - /etc/outrider/{{ .role }}.toml
        {{- if not $router }}
        - --{{ .role }}-id
        - $(POD_NAME)
        {{- end }}
        {{- if .root.Values.tls.enabled }}
        - --tls-cert=/etc/outrider-tls/tls.crt
        - --tls-key=/etc/outrider-tls/tls.key
        - --tls-ca=/etc/outrider-tls/ca.crt
        {{- end }}
        {{- if and $router .root.Values.apiKeys.existingSecret }}
        - --api-keys=/etc/outrider-keys/keys.toml
        {{- end }}
      env:
        - name: POD_NAME
          valueFrom: {fieldRef: {fieldPath: metadata.name}}
        {{- with $values.extraEnv }}{{ toYaml . | nindent 8 }}{{ end }}
      {{- with $values.extraEnvFrom }}
      envFrom: {{ toYaml . | nindent 8 }}
      {{- end }}
      ports:
        - {name: grpc, containerPort: {{ .port }}}
        {{- if $router }}
        - {name: http, containerPort: 8000}
        {{- end }}
        - {name: metrics, containerPort: {{ .metrics }}}
      {{- if $router }}
      lifecycle:
        preStop:
          sleep: {seconds: {{ $values.preStopSeconds }}}
      {{- end }}
      {{- include "outrider.probes" . | nindent 6 }}
      resources: {{ toYaml $values.resources | nindent 8 }}
      securityContext: {{ include "outrider.securityContext" . | nindent 8 }}
      volumeMounts:
        - {name: config, mountPath: /etc/outrider, readOnly: true}
        - {name: models, mountPath: /models, readOnly: true}
        - {name: tmp, mountPath: /tmp}
        {{- if not $router }}
        - {name: shm, mountPath: /dev/shm}
        {{- end }}
        {{- if .root.Values.tls.enabled }}
        - {name: tls, mountPath: /etc/outrider-tls, readOnly: true}
        {{- end }}
        {{- if and $router .root.Values.apiKeys.existingSecret }}
        - {name: keys, mountPath: /etc/outrider-keys, readOnly: true}
        {{- end }}
        {{- with $values.extraVolumeMounts }}{{ toYaml . | nindent 8 }}{{ end }}
  volumes:
    - name: config
      configMap: {name: {{ $name }}-{{ .role }}}
    - name: models
      {{- if .root.Values.models.persistence.enabled }}
      persistentVolumeClaim:
        claimName: {{ include "outrider.claim" . }}
      {{- else }}
      emptyDir: {sizeLimit: 4Gi}
      {{- end }}
    - name: tmp
      emptyDir: {sizeLimit: 2Gi}
    {{- if not $router }}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $values.shmSize }}}
    {{- end }}
    {{- if .root.Values.tls.enabled }}
    - name: tls
      secret: {secretName: {{ $name }}-{{ .role }}-tls, defaultMode: 0440}
    {{- end }}
    {{- if and $router .root.Values.apiKeys.existingSecret }}
    - name: keys
      secret: {secretName: {{ .root.Values.apiKeys.existingSecret }}, defaultMode: 0440}
    {{- end }}
    {{- with $values.extraVolumes }}{{ toYaml . | nindent 4 }}{{ end }}
{{- end -}}

{{- define "outrider.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- define "outrider.placement" -}}
{{- if eq .role "drafter" -}}
{{- $near := .root.Values.drafter.nearVerifier -}}
{{- $verifier := include "outrider.selector" (dict "root" .root "role" "verifier") -}}
affinity:
  # Drafts and verdicts cross between the two in every round.
  podAffinity:
    {{- if eq $near "required" }}
    requiredDuringSchedulingIgnoredDuringExecution:
      - topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels: {{ $verifier | nindent 12 }}
    {{- else }}
    preferredDuringSchedulingIgnoredDuringExecution:
      {{- range $weight, $key := dict "100" "kubernetes.io/hostname" "50" "topology.kubernetes.io/zone" }}
      - weight: {{ $weight }}
        podAffinityTerm:
          topologyKey: {{ $key }}
          labelSelector:
            matchLabels: {{ $verifier | nindent 14 }}
      {{- end }}
    {{- end }}
{{- else -}}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{ include "outrider.selector" . | nindent 8 }}
{{- end -}}
{{- end -}}

{{/* The kubelet's gRPC probes cannot speak TLS: with it, an open port must do. */}}
{{- define "outrider.probes" -}}
{{- $values := get .root.Values .role -}}
{{- $router := eq .role "router" -}}
{{- $alive := dict "grpc" (dict "port" .port "service" "grpc.health.v1.Health") -}}
{{- $serves := dict "grpc" (dict "port" .port "service" .service) -}}
{{- if .root.Values.tls.enabled -}}
{{- $alive = dict "tcpSocket" (dict "port" "grpc") -}}
{{- $serves = $router | ternary (dict "httpGet" (dict "path" "/health" "port" "http" "scheme" "HTTPS")) $alive -}}
{{- end -}}
# The port of a {{ .role }} opens when it {{ $router | ternary "has read its journal" "is loaded and warm" }}.
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
