// SPDX-License-Identifier: Apache-2.0

//go:build kubernetes

package dra

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/test/kubernetes/kube"
)

const vgpu = `{apiVersion: cgpu.io/v1alpha1, kind: VGPUConfig%s}`

func devices(parameters, request string) string {
	return fmt.Sprintf(`{requests: [%s], config: [{opaque: {driver: gpu.cgpu.io, parameters: %s}}]}`, request, parameters)
}

const anyGPU = `{name: gpu, exactly: {deviceClassName: vgpu.cgpu.io}}`

func claimOf(namespace, devices string) string {
	return fmt.Sprintf(`{apiVersion: resource.k8s.io/v1, kind: ResourceClaim, metadata: {generateName: policy-, namespace: %s}, spec: {devices: %s}}`, namespace, devices)
}

func templateOf(devices string) string {
	return fmt.Sprintf(`{apiVersion: resource.k8s.io/v1, kind: ResourceClaimTemplate, metadata: {generateName: policy-}, spec: {spec: {devices: %s}}}`, devices)
}

func classOf(parameters string) string {
	return fmt.Sprintf(`{apiVersion: resource.k8s.io/v1, kind: DeviceClass, metadata: {generateName: policy-}, spec: {config: [{opaque: {driver: gpu.cgpu.io, parameters: %s}}]}}`, parameters)
}

// create asks the apiserver without writing.
func create(manifest string) error {
	_, err := kube.Kubectl(dir, manifest, "create", "--dry-run=server", "-f", "-")
	return err
}

func TestPolicy(t *testing.T) {
	apply(t, "base/deviceclasses.yaml", "base/admission.yaml")
	wrong := claimOf("default", devices(fmt.Sprintf(vgpu, ", weight: 65"), anyGPU))
	kube.Until(t, time.Minute, "the policy is in force", func() error {
		if create(wrong) == nil {
			return errors.New("weight 65 is taken")
		}
		return nil
	})
	for fields, want := range map[string]string{
		``:            "",
		`, weight: 1`: "",
		`, weight: 64, percent: 100, containers: 64, priority: best-effort, spill: 4Gi`: "",
		`, spill: 0`:         "",
		`, spill: "0"`:       "",
		`, spill: 1048576`:   "",
		`, weight: 0`:        "weight: want 1 to 64",
		`, weight: 65`:       "weight: want 1 to 64",
		`, weight: "3"`:      "weight: want 1 to 64",
		`, weight: 1.5`:      "weight: want 1 to 64",
		`, percent: 101`:     "percent: want 1 to 100",
		`, containers: 65`:   "containers: want 1 to 64",
		`, priority: urgent`: "priority: want best-effort, default or high",
		`, priority: 2`:      "priority: want best-effort, default or high",
		`, spill: 4GiB`:      "spill: want 0, or 1Mi to 1Pi",
		`, spill: -1Gi`:      "spill: want 0, or 1Mi to 1Pi",
		`, spill: 1Ki`:       "spill: want 0, or 1Mi to 1Pi",
		`, spill: 5`:         "spill: want 0, or 1Mi to 1Pi",
		`, spill: [1Gi]`:     "spill: want 0, or 1Mi to 1Pi",
		`, wieght: 3`:        "unknown field wieght: want weight, priority",
		`, Weight: 3`:        "unknown field Weight: want weight, priority",
	} {
		parameters := fmt.Sprintf(vgpu, fields)
		for kind, manifest := range map[string]string{
			"claim":    claimOf("default", devices(parameters, anyGPU)),
			"template": templateOf(devices(parameters, anyGPU)),
			"class":    classOf(parameters),
		} {
			err := create(manifest)
			if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
				t.Errorf("%s with %q: %v, want %q", kind, fields, err, want)
			}
		}
	}
	for manifest, want := range map[string]string{
		claimOf("default",
			devices(`{weight: 3}`, anyGPU)): "want apiVersion: cgpu.io/v1alpha1, kind: VGPUConfig",
		claimOf("default", devices(`{apiVersion: gpu.example.com/v1, kind: GpuConfig}`,
			anyGPU)): "want apiVersion: cgpu.io/v1alpha1, kind: VGPUConfig",
		claimOf("default", `{}`): "",
		templateOf(`{}`):         "",
		claimOf("default",
			`{requests: [`+anyGPU+`], config: [{opaque: {driver: gpu.example.com, parameters: {apiVersion: x/v1, kind: Y, z: 1}}}]}`): "",
		claimOf("default",
			`{requests: [{name: gpu, exactly: {deviceClassName: gpu.cgpu.io}}]}`): "",
		claimOf("default",
			`{requests: [{name: gpu, exactly: {deviceClassName: gpu.cgpu.io, capacity: {requests: {memory: 6Gi}}}}]}`): "is a whole GPU",
		claimOf("default",
			`{requests: [{name: gpu, firstAvailable: [{name: a, deviceClassName: gpu.cgpu.io, capacity: {requests: {memory: 6Gi}}}]}]}`): "is a whole GPU",
		claimOf("default",
			`{requests: [{name: gpu, firstAvailable: [{name: a, deviceClassName: gpu.cgpu.io}, {name: b, deviceClassName: vgpu.cgpu.io, capacity: {requests: {memory: 6Gi}}}]}]}`): "",
	} {
		err := create(manifest)
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %v, want %q", manifest, err, want)
		}
	}
}

// TestPrivileges: the policy denies high priority, spill and great weights where the namespace has no label.
func TestPrivileges(t *testing.T) {
	apply(t, "base/deviceclasses.yaml", "base/admission-privileges.yaml")
	t.Cleanup(func() {
		if _, err := kube.Kubectl(dir, "", "delete", "-f", "../../../deploy/base/admission-privileges.yaml"); err != nil {
			t.Error(err)
		}
	})
	for _, ns := range []string{"plain", "trusted"} {
		if _, err := kube.Kubectl(dir, "", "create", "namespace", ns); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := kube.Kubectl(dir, "", "label", "namespace", "trusted", "cgpu.io/allow-high-priority=true",
		"cgpu.io/allow-spill=true"); err != nil {
		t.Fatal(err)
	}
	of := func(namespace, fields string) error {
		return create(claimOf(namespace, devices(fmt.Sprintf(vgpu, fields), anyGPU)))
	}
	kube.Until(t, time.Minute, "the policy is in force", func() error {
		if of("plain", ", priority: high") == nil {
			return errors.New("high priority is taken")
		}
		return nil
	})
	if err := of("plain", ", spill: 1Gi"); err == nil || !strings.Contains(err.Error(), "cgpu.io/allow-spill=true") {
		t.Error(err)
	}
	if err := of("plain", ", weight: 11"); err == nil || !strings.Contains(err.Error(), "cgpu.io/allow-weight=true") {
		t.Error(err)
	}
	for _, fields := range []string{", priority: default, spill: 0", ", weight: 10"} {
		if err := of("plain", fields); err != nil {
			t.Errorf("%s: %v", fields, err)
		}
	}
	if err := of("trusted", ", priority: high, spill: 1Gi"); err != nil {
		t.Error(err)
	}
}
