{{- define "cgpu.labels" -}}
app.kubernetes.io/name: cgpu
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "cgpu.selector" -}}
app.kubernetes.io/name: cgpu
app.kubernetes.io/component: agent
{{- end }}

{{/* Labels of what Prometheus' operator reads. */}}
{{- define "cgpu.monitored" -}}
{{ include "cgpu.labels" . }}
{{- with .Values.monitoring.labels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* How an agent is scraped; deploy/components/pod-monitor says why. */}}
{{- define "cgpu.scrape" -}}
interval: {{ .Values.monitoring.interval }}
relabelings:
- {action: replace, sourceLabels: [__meta_kubernetes_pod_node_name], targetLabel: instance}
- {action: labeldrop, regex: namespace|pod|container|service|endpoint}
{{- end }}

{{/* A file of deploy/base, with the names of this release; TestChartFiles holds the copies to their sources. */}}
{{- define "cgpu.file" -}}
{{ .root.Files.Get (printf "files/%s.yaml" .name) | replace "system:serviceaccount:cgpu-system:" (printf "system:serviceaccount:%s:" .root.Release.Namespace) | replace "runtimeClassName: cgpu" (printf "runtimeClassName: %s" .root.Values.runtimeClass.name) | replace "validationActions: [Warn]" (printf "validationActions: [%s]" .root.Values.admission.runtimeClass) }}
{{- end }}

{{/* admission.limits as CEL has maps: all values are text. */}}
{{- define "cgpu.limits" -}}
{{- $limits := dict -}}
{{- range $name, $value := .Values.admission.limits }}{{ $_ := set $limits $name (toString $value) }}{{ end -}}
{{- toJson $limits -}}
{{- end }}

{{- define "cgpu.checks" -}}
{{- $dra := toString .Values.draGPUs -}}
{{- $plugin := toString .Values.devicePluginGPUs -}}
{{- $both := and (has "dra" .Values.frontends) (has "deviceplugin" .Values.frontends) -}}
{{- if and $both (not (and $dra $plugin)) -}}
{{- fail "frontends: dra and deviceplugin on one node: set draGPUs and devicePluginGPUs, for no GPU is offered by both" -}}
{{- end -}}
{{- if and (not $both) (or $dra $plugin) -}}
{{- fail "draGPUs, devicePluginGPUs: there is one front end, which has all GPUs: leave them empty" -}}
{{- end -}}
{{- range (splitList "," $dra) -}}
{{- if and . (has . (splitList "," $plugin)) -}}
{{- fail (printf "draGPUs, devicePluginGPUs: %s is in both" .) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.extendedResource (not (has "dra" .Values.frontends)) -}}
{{- fail "extendedResource: is served by claims: add dra to frontends" -}}
{{- end -}}
{{- if and .Values.installer.enabled (not .Values.admission.enabled) -}}
{{- fail "installer.enabled: its token may patch nodes, and the policy that keeps it to one label of its own node is off: set admission.enabled" -}}
{{- end -}}
{{- if and .Values.monitoring.podMonitor .Values.monitoring.serviceMonitor -}}
{{- fail "monitoring: podMonitor and serviceMonitor: everything would be scraped twice" -}}
{{- end -}}
{{- end }}
