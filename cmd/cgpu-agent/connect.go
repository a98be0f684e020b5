// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// ownPace is that of what the agent does on its own. Of what containers wait for (atOnce) nothing waits: they come one by one anyway.
const (
	ownPace = 10
	atOnce  = -1
)

// connect makes a client of the API server, of so many requests a second. It does not talk to it yet: that may be away for minutes.
func connect(kubeconfig string, pace float32) (kubernetes.Interface, error) {
	var c *rest.Config
	var err error
	if kubeconfig != "" {
		if c, err = clientcmd.BuildConfigFromFlags("", kubeconfig); err != nil {
			return nil, fmt.Errorf("--kubeconfig %q: %w", kubeconfig, err)
		}
	} else if c, err = rest.InClusterConfig(); err != nil {
		return nil, fmt.Errorf("--kubeconfig: is not set, and this is no pod with a service account (%w): name a file", err)
	}
	// Half the memory and time of JSON, for the API server too.
	c.ContentType = "application/vnd.kubernetes.protobuf"
	c.AcceptContentTypes = "application/vnd.kubernetes.protobuf,application/json"
	c.UserAgent = "cgpu-agent/" + version
	c.QPS, c.Burst = pace, int(2*pace)
	client, err := kubernetes.NewForConfig(c)
	if err != nil {
		return nil, fmt.Errorf("--kubeconfig %q: %w", kubeconfig, err)
	}
	return client, nil
}
