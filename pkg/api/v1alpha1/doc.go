// SPDX-License-Identifier: Apache-2.0

// Package v1alpha1 is what the author of a ResourceClaim or of a DeviceClass may say of a vGPU beside its capacity: the
// opaque configuration of the DRA driver gpu.cgpu.io.
//
//	config:
//	- opaque:
//	    driver: gpu.cgpu.io
//	    parameters: {apiVersion: cgpu.io/v1alpha1, kind: VGPUConfig, weight: 4, priority: high}
//
// The package is pure and small, so that others can import it.
package v1alpha1
