{{/* The pod template of a role: dict "root" $ "role" "router". */}}
{{- define "outrider.pod" -}}
{{- $values := get .root.Values .role -}}
{{- $name := include "outrider.name" .root -}}
{{- $router := eq .role "router" -}}
{{- $drafter := and (eq .role "verifier") .root.Values.drafter.inVerifierPod | ternary (dict "root" .root "role" "drafter") (dict) -}}
metadata:
  labels:
    {{- include "outrider.selector" . | nindent 4 }}
    {{- include "outrider.fetches" . | nindent 4 }}
    {{- with $values.podLabels }}{{ toYaml . | nindent 4 }}{{ end }}
  annotations:
    # A change of the configuration restarts the pods.
    outrider.io/config: {{ include "outrider.config" . | sha256sum }}
    {{- with $drafter }}
    outrider.io/drafter-config: {{ include "outrider.config" . | sha256sum }}
    {{- end }}
    {{- with $values.podAnnotations }}{{ toYaml . | nindent 4 }}{{ end }}
spec:
  serviceAccountName: {{ $name }}-{{ .role }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  {{- with .root.Values.imagePullSecrets }}
  imagePullSecrets: {{ toYaml . | nindent 4 }}
  {{- end }}
  # preStop, drain_timeout_s, and 10 s for closing connections.
  {{- $drain := include "outrider.drain" . }}
  {{- with $drafter }}{{ $drain = max $drain (include "outrider.drain" .) }}{{ end }}
  terminationGracePeriodSeconds: {{ add $drain (default 0 $values.preStopSeconds) 10 }}
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
    # Downloads and converts the model before probes begin, or finds it in the volume that the Job fills.
    {{- include "outrider.models" . | nindent 4 }}
  {{- end }}
  containers:
    {{- include "outrider.container" . | nindent 4 }}
    {{- with $drafter }}
    {{- include "outrider.container" . | nindent 4 }}
    {{- end }}
  volumes:
    - name: config
      configMap: {name: {{ $name }}-{{ .role }}}
    {{- with $drafter }}
    - name: config-drafter
      configMap: {name: {{ $name }}-drafter}
    {{- end }}
    - name: models
      {{- if .root.Values.models.persistence.enabled }}
      persistentVolumeClaim:
        claimName: {{ include "outrider.claim" . }}
      {{- else }}
      emptyDir: {sizeLimit: {{ .root.Values.models.cacheSize }}}
      {{- end }}
    - name: tmp
      emptyDir: {sizeLimit: {{ $values.tmpSize }}}
    {{- if and $router (eq .root.Values.router.journal.volume "emptyDir") }}
    - name: journal
      emptyDir: {sizeLimit: {{ $values.journal.size }}}
    {{- end }}
    {{- if not $router }}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $values.shmSize }}}
    {{- end }}
    {{- if .root.Values.tls.enabled }}
    - name: tls
      secret: {secretName: {{ $name }}-{{ .role }}-tls, defaultMode: 0440}
    {{- with $drafter }}
    # Each container has the certificate of its own role.
    - name: tls-drafter
      secret: {secretName: {{ $name }}-drafter-tls, defaultMode: 0440}
    {{- end }}
    {{- end }}
    {{- if and $router .root.Values.apiKeys.existingSecret }}
    - name: keys
      secret: {secretName: {{ .root.Values.apiKeys.existingSecret }}, defaultMode: 0440}
    {{- end }}
    {{- with $values.extraVolumes }}{{ toYaml . | nindent 4 }}{{ end }}
    {{- if $drafter }}
    {{- with .root.Values.drafter.extraVolumes }}{{ toYaml . | nindent 4 }}{{ end }}
    {{- end }}
{{- end -}}

{{/* drain_timeout_s of a process, rounded up to whole seconds. */}}
{{- define "outrider.drain" -}}
{{- default (dict "router" 30 "verifier" 20 "drafter" 10 | dig .role 0) (get .root.Values .role).config.drain_timeout_s | ceil | int -}}
{{- end -}}

{{- define "outrider.placement" -}}
{{- if eq .role "drafter" -}}
{{- $near := .root.Values.drafter.nearVerifier -}}
{{- $verifier := include "outrider.selector" (dict "root" .root "role" "verifier") -}}
affinity:
  # Verifier and drafter exchange messages in every round.
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
