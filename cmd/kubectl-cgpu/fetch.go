// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/kubernetes"

	"github.com/opencgpu/cgpu/pkg/cluster"
)

// fetch reads what the accounting needs. Some of it a user may not see: then warn is told what is missing, and the rest is
// shown. namespace is where he is asked to look if he may not look everywhere.
func fetch(ctx context.Context, client kubernetes.Interface, namespace string, warn func(string, ...any)) (o cluster.Objects, err error) {
	// One page is what the apiserver gives from its cache at once; a list of thousands of pods is some megabytes.
	var all metav1.ListOptions
	nodes, err := client.CoreV1().Nodes().List(ctx, all)
	switch {
	case apierrors.IsForbidden(err):
		warn("nodes may not be listed (%v): addresses and what the device plugin offers are missing", err)
	case err != nil:
		return o, fmt.Errorf("list nodes: %w", err)
	default:
		o.Nodes = nodes.Items
	}
	// Finished pods hold nothing.
	running := metav1.ListOptions{FieldSelector: fields.AndSelectors(fields.OneTermNotEqualSelector("status.phase", "Succeeded"),
		fields.OneTermNotEqualSelector("status.phase", "Failed")).String()}
	pods, err := client.CoreV1().Pods(metav1.NamespaceAll).List(ctx, running)
	if apierrors.IsForbidden(err) && namespace != "" {
		warn("pods may not be listed in all namespaces: what the device plugin gave is that of namespace %s only", namespace)
		pods, err = client.CoreV1().Pods(namespace).List(ctx, running)
	}
	if err != nil {
		return o, fmt.Errorf("list pods: %w%s", err, hint(err, namespace))
	}
	o.Pods = pods.Items
	slices, err := client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{FieldSelector: "spec.driver=" + cluster.Driver})
	switch {
	case apierrors.IsNotFound(err): // a cluster without DRA, or before 1.34
		return o, nil
	case apierrors.IsForbidden(err):
		warn("resourceslices may not be listed (%v): GPUs of the DRA driver are shown only where somebody has a share", err)
	case err != nil:
		return o, fmt.Errorf("list resourceslices: %w", err)
	default:
		o.Slices = slices.Items
	}
	claims, err := client.ResourceV1().ResourceClaims(metav1.NamespaceAll).List(ctx, all)
	if apierrors.IsForbidden(err) && namespace != "" {
		warn("resourceclaims may not be listed in all namespaces: what claims have is that of namespace %s only", namespace)
		claims, err = client.ResourceV1().ResourceClaims(namespace).List(ctx, all)
	}
	if err != nil {
		return o, fmt.Errorf("list resourceclaims: %w%s", err, hint(err, namespace))
	}
	o.Claims = claims.Items
	// Without it, only the classes of cgpu's manifests are known.
	if classes, err := client.ResourceV1().DeviceClasses().List(ctx, all); err == nil {
		o.Classes = classes.Items
	}
	return o, nil
}

// hint is the remedy for who may see one namespace only.
func hint(err error, namespace string) string {
	if apierrors.IsForbidden(err) && namespace == "" {
		return ": name a namespace of yours with -n"
	}
	return ""
}
