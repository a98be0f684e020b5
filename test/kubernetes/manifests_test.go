// SPDX-License-Identifier: Apache-2.0

//go:build kubernetes

package kubernetes

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/quota"
)

// pod is a manifest of a pod with the RuntimeClass; spec has its containers.
func pod(name, spec string) string { return podOf(name, "", "runtimeClassName: cgpu\n"+spec) }

// podOf is one with further metadata and without a RuntimeClass.
func podOf(name, metadata, spec string) string {
	return fmt.Sprintf(`apiVersion: v1
kind: Pod
metadata:
  name: %s
%s
spec:
  restartPolicy: Never
  terminationGracePeriodSeconds: 1
  automountServiceAccountToken: false
%s`, name, indent(metadata), indent(spec))
}

func indent(text string) string {
	lines := strings.Split(strings.Trim(text, "\n"), "\n")
	for i := range lines {
		lines[i] = "  " + strings.TrimLeft(lines[i], "\t")
	}
	return strings.Join(lines, "\n")
}

// claim asks for one share on one of the GPUs that claims have; more is put beside the requests.
func claim(name, memory, more string) string {
	return fmt.Sprintf(`apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: %s}
spec:
  devices:
    requests:
    - name: gpu
      exactly: {deviceClassName: vgpu.cgpu.io, capacity: {requests: {memory: %s}}}
%s`, name, memory, indent(indent(more)))
}

// configured is the opaque configuration of a claim's requests.
func configured(parameters string) string {
	return fmt.Sprintf("config: [{opaque: {driver: gpu.cgpu.io, parameters: {apiVersion: cgpu.io/v1alpha1, kind: VGPUConfig, %s}}}]",
		parameters)
}

// withClaim is the spec of a pod of one container with one claim.
func withClaim(claim, command string) string {
	return fmt.Sprintf(`containers: [{name: c, image: "localhost/probe:cgpu", command: [sh, -c, %q], resources: {claims: [{name: gpu}]}}]
resourceClaims: [{name: gpu, resourceClaimName: %s}]`, command, claim)
}

// withMemory is the spec of a pod of one container with units of aliyun.com/gpu-mem.
func withMemory(units int, command string) string {
	return fmt.Sprintf(`containers: [{name: c, image: "localhost/probe:cgpu", command: [sh, -c, %q], resources: {limits: {aliyun.com/gpu-mem: %d}}}]`, command, units)
}

// withUnits are the manifests of a pod with a share by the device plugin, or below CRI-O, where that cannot be, by a claim.
func withUnits(name string, units int, command string) []string {
	if crio() {
		return []string{claim(name, fmt.Sprint(units, "Gi"), ""), pod(name, withClaim(name, command))}
	}
	return []string{pod(name, withMemory(units, command))}
}

// totals are the sizes of the GPUs that `cgpu-probe meminfo` found, one for each time it ran.
func totals(t *testing.T, output string) []quota.Bytes {
	t.Helper()
	var sizes []quota.Bytes
	for _, m := range regexp.MustCompile(`(?m)^total_mib=(\d+)`).FindAllStringSubmatch(output, -1) {
		n, err := strconv.Atoi(m[1])
		if err != nil {
			t.Fatal(err)
		}
		sizes = append(sizes, quota.Bytes(n)*quota.MiB)
	}
	if len(sizes) == 0 {
		t.Fatalf("no total_mib in %q", output)
	}
	return sizes
}

// seesOnly fails the test unless the program saw one GPU of that size.
func seesOnly(t *testing.T, output string, want quota.Bytes) {
	t.Helper()
	if got := totals(t, output); len(got) != 1 || got[0] != want {
		t.Errorf("the pod sees %v, want %v\n%s", got, want, output)
	}
}
