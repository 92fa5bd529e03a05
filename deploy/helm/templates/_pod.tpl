{{- define "tightwire.labels" -}}
app.kubernetes.io/name: tightwire
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* One pod template for every host: the command is the same, and LeaderWorkerSet's variables say which host it is. */}}
{{- define "tightwire.pod" -}}
{{- $secret := and (gt (int .Values.hosts) 1) .Values.commSecret }}
metadata:
  labels:
    {{- include "tightwire.labels" . | nindent 4 }}
    llm-d.ai/engine-type: {{ ternary "vllm" "tightwire" (eq .Values.metricsAlias "vllm") }}
spec:
  # Without this a Service's variables, such as TIGHTWIRE_PORT, would be in the environment.
  enableServiceLinks: false
  terminationGracePeriodSeconds: 45 # more than preStop and --shutdown-grace-s together
  securityContext: { runAsUser: 10001, runAsGroup: 10001, fsGroup: 10001, runAsNonRoot: true }
  containers:
    - name: tightwire
      image: "{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}"
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      args:
        - serve
        - {{ .Values.model | quote }}
        - --host=0.0.0.0
        - --tp={{ .Values.tp }}
        - --device={{ ternary "cuda" "cpu" (gt (int .Values.gpus) 0) }}
        - --metrics-alias={{ .Values.metricsAlias }}
        {{- if gt (int .Values.hosts) 1 }}
        - --join-timeout-s={{ mul 60 .Values.startupMinutes }}
        {{- end }}
        {{- if $secret }}
        - --comm-secret-file=/run/tightwire/secret
        {{- end }}
        {{- if .Values.apiKeySecret }}
        - --api-key=$(API_KEY)
        {{- end }}
        {{- range .Values.args }}
        - {{ . | quote }}
        {{- end }}
      env:
        {{- if .Values.apiKeySecret }}
        - name: API_KEY
          valueFrom: { secretKeyRef: { name: {{ .Values.apiKeySecret }}, key: api-key } }
        {{- end }}
        {{- with .Values.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        - { name: http, containerPort: 8000 }
      startupProbe:
        httpGet: { path: /health/ready, port: http }
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: {{ mul 6 .Values.startupMinutes }}
      readinessProbe:
        httpGet: { path: /health/ready, port: http }
        timeoutSeconds: 5
      # Not /health/ready: a server that drains is not ready, and must not be killed for it.
      livenessProbe:
        httpGet: { path: /health/live, port: http }
        timeoutSeconds: 5
      # A server without running requests ends at once after SIGTERM, while proxies may still send it new ones.
      lifecycle:
        preStop: { exec: { command: [sleep, "5"] } }
      resources:
        {{- if .Values.resources.requests }}
        requests: {{- toYaml .Values.resources.requests | nindent 10 }}
        {{- end }}
        {{- if or .Values.resources.limits .Values.gpus }}
        limits:
          {{- with .Values.resources.limits }}
          {{- toYaml . | nindent 10 }}
          {{- end }}
          {{- if .Values.gpus }}
          nvidia.com/gpu: {{ .Values.gpus }}
          {{- end }}
        {{- end }}
      volumeMounts:
        - { name: cache, mountPath: /cache }
        - { name: shm, mountPath: /dev/shm }
        {{- if $secret }}
        - { name: comm-secret, mountPath: /run/tightwire, readOnly: true }
        {{- end }}
  volumes:
    - name: cache
      {{- if .Values.cacheClaim }}
      persistentVolumeClaim: { claimName: {{ .Values.cacheClaim }} }
      {{- else }}
      emptyDir: {}
      {{- end }}
    # For NCCL; a container's own /dev/shm has 64 MB.
    - name: shm
      emptyDir: { medium: Memory }
    {{- if $secret }}
    - name: comm-secret
      secret: { secretName: {{ $secret }} }
    {{- end }}
  {{- with .Values.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.affinity }}
  affinity: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
