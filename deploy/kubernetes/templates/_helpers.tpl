{{/* The configuration of what is served, for Serve's `args`. */}}
{{- define "crossdraft.config" -}}
{{- $config := deepCopy .Values.config }}
{{- $fronts := 0 }}
{{- range .Values.groups }}{{- if hasKey .offers "ingress" }}{{- $fronts = add $fronts .replicas }}{{- end }}{{- end }}
{{- range $name := list "http" "grpc" }}
{{- with get $config $name }}{{- $_ := set $config $name (merge . (dict "host" "0.0.0.0" "replicas" $fronts)) }}{{- end }}
{{- end }}
{{- with .Values.secrets }}
{{- $security := dict }}
{{- if .apiKeys }}{{- $_ := set $security "api_keys" "/etc/crossdraft/keys/keys.txt" }}{{- end }}
{{- if .authority }}
{{- $tls := dict }}
{{- range $name, $file := dict "ca" "ca.pem" "cert" "node.pem" "key" "node.key" }}
{{- $_ := set $tls $name (printf "/etc/crossdraft/tls/%s" $file) }}
{{- end }}
{{- $_ := set $security "tls" $tls }}
{{- end }}
{{- if $security }}{{- $_ := set $config "security" $security }}{{- end }}
{{- if and .grpcTls $config.grpc }}
{{- $_ := set $config.grpc "ssl_certfile" "/etc/crossdraft/grpc/tls.crt" }}
{{- $_ := set $config.grpc "ssl_keyfile" "/etc/crossdraft/grpc/tls.key" }}
{{- end }}
{{- end }}
{{- toYaml $config }}
{{- end }}

{{/* A pod of a group, or of the head, as a list of the root and the group. */}}
{{- define "crossdraft.pod" -}}
{{- $root := index . 0 }}{{- $group := index . 1 }}
{{- $values := $root.Values }}{{- $offers := $group.offers }}
{{- $front := hasKey ($offers | default dict) "ingress" }}
{{- $http := or $front (not $offers) }}{{/* the head sees whether keys and certificates have changed */}}
{{- $tls := and $values.secrets.authority $offers -}}
metadata:
  labels: {app: {{ $root.Release.Name }}{{ if $front }}, crossdraft/front: "true"{{ end }}}
spec:
  terminationGracePeriodSeconds: {{ add ($values.config.grace_seconds | default 30) 30 }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 10001
    fsGroup: 10001
    seccompProfile: {type: RuntimeDefault}
  affinity:  # not two of a group on one node, where there are enough nodes
    podAntiAffinity:
      preferredDuringSchedulingIgnoredDuringExecution:
        - weight: 100
          podAffinityTerm:
            topologyKey: kubernetes.io/hostname
            labelSelector: {matchLabels: {app: {{ $root.Release.Name }}, ray.io/group: {{ $group.name }}}}
  {{- with $values.imagePullSecrets }}
  imagePullSecrets: {{ toYaml . | nindent 4 }}
  {{- end }}
  {{- with $group.pod }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- if $tls }}
  initContainers:  # only this one sees the authority's key
    - name: certificate
      image: {{ $values.image }}
      command:
        - bash
        - -ec
        - cp /authority/ca.* /tls; crossdraft certs /tls --host "node,${POD_IP}"; rm /tls/ca.key
      env: [{name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}]
      securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
      resources: {requests: {cpu: "1", memory: 1Gi}, limits: {memory: 1Gi}}
      volumeMounts: [{name: authority, mountPath: /authority}, {name: certificate, mountPath: /tls}]
  {{- end }}
  containers:
    - name: ray
      image: {{ $values.image }}
      ports:
        - {name: gcs-server, containerPort: 6379}
        - {name: dashboard, containerPort: 8265}
        - {name: metrics, containerPort: 8080}
        {{- if $http }}
        - {name: serve, containerPort: {{ $values.config.http.port }}}
        {{- end }}
        {{- if and $front $values.config.grpc }}
        - {name: grpc, containerPort: {{ $values.config.grpc.port }}}
        {{- end }}
        {{- with $values.config.metrics_port }}
        - {name: crossdraft, containerPort: {{ . }}}
        {{- end }}
      env:
        - {name: RAY_USAGE_STATS_ENABLED, value: "0"}
        # Serve's proxies ask fronts by gRPC, with keepalive: a node that is lost stops no front of another one.
        - {name: RAY_SERVE_PROXY_USE_GRPC, value: "1"}
        - {name: RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH, value: crossdraft.cluster.serve_grpc.set_up_proxy}
        # The head's health checks. With Ray's own patience of 10 s, streams pause for longer when a node is lost.
        - {name: RAY_health_check_period_ms, value: "1000"}
        - {name: RAY_health_check_timeout_ms, value: "3000"}
        - {name: RAY_health_check_failure_threshold, value: "5"}
        {{- with ternary $values.secrets.hfToken "" (not (empty $offers)) }}
        - {name: HF_TOKEN, valueFrom: {secretKeyRef: {name: {{ . }}, key: token}}}
        {{- end }}
        {{- with $values.env }}{{ toYaml . | nindent 8 }}{{- end }}
      {{- if $offers }}
      readinessProbe:  # the operator's own asks every pod for Serve
        exec:
          command:
            - bash
            - -c
            - >-
              wget --tries 1 -T 2 -q -O- http://localhost:52365/api/local_raylet_healthz | grep success
              {{- if $front }}
              && wget --tries 1 -T 2 -q -O- http://localhost:{{ $values.config.http.port }}/-/healthz | grep success
              {{- with $values.config.grpc }}
              && true < /dev/tcp/127.0.0.1/{{ .port }}
              {{- end }}
              {{- end }}
        initialDelaySeconds: 10
        periodSeconds: 5
        timeoutSeconds: 5
      {{- end }}
      securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
      resources:
        requests: {cpu: {{ $group.cpu | quote }}, memory: {{ $group.memory }}}
        limits: {memory: {{ $group.memory }}{{ with $group.gpus }}, nvidia.com/gpu: {{ . }}{{ end }}}
      volumeMounts:
        - {name: models, mountPath: /home/crossdraft/models}
        {{- if and $http $values.secrets.apiKeys }}
        - {name: keys, mountPath: /etc/crossdraft/keys, readOnly: true}
        {{- end }}
        {{- if and $http $values.secrets.grpcTls }}
        - {name: grpc, mountPath: /etc/crossdraft/grpc, readOnly: true}
        {{- end }}
        {{- if $tls }}
        - {name: certificate, mountPath: /etc/crossdraft/tls, readOnly: true}
        {{- end }}
  volumes:
    - {{ merge (dict "name" "models") ($values.modelVolume | default (dict "emptyDir" dict)) | toJson }}
    {{- if and $http $values.secrets.apiKeys }}
    - {name: keys, secret: {secretName: {{ $values.secrets.apiKeys }}}}
    {{- end }}
    {{- if and $http $values.secrets.grpcTls }}
    - {name: grpc, secret: {secretName: {{ $values.secrets.grpcTls }}}}
    {{- end }}
    {{- if $tls }}
    - {name: authority, secret: {secretName: {{ $values.secrets.authority }}}}
    - {name: certificate, emptyDir: {medium: Memory}}
    {{- end }}
{{- end }}
