// SPDX-License-Identifier: Apache-2.0

// Command k8s is etcd, Kubernetes' control plane, the kubelet and kubectl in one file: the name it is called by says which.
//
// The components share most of their code, so one link step takes half the time of six, and the file is a third of their
// sum. Kubernetes' own mains cannot be installed from the module proxy, because its go.mod points at folders that the
// module does not contain; this module names the published versions in their place (build.sh tells how to move on).
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"go.etcd.io/etcd/server/v3/etcdmain"
	_ "k8s.io/client-go/plugin/pkg/client/auth"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	kubectl "k8s.io/kubectl/pkg/cmd"
	kubectlutil "k8s.io/kubectl/pkg/cmd/util"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	manager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

var components = map[string]func(){
	"etcd":                    func() { etcdmain.Main(os.Args) },
	"kube-apiserver":          func() { os.Exit(cli.Run(apiserver.NewAPIServerCommand())) },
	"kube-scheduler":          func() { os.Exit(cli.Run(scheduler.NewSchedulerCommand())) },
	"kube-controller-manager": func() { os.Exit(cli.Run(manager.NewControllerManagerCommand())) },
	"kubelet":                 func() { os.Exit(cli.Run(kubelet.NewKubeletCommand(context.Background()))) },
	"kubectl": func() {
		if err := cli.RunNoErrOutput(kubectl.NewDefaultKubectlCommand()); err != nil {
			kubectlutil.CheckErr(err)
		}
	},
}

func main() {
	name := filepath.Base(os.Args[0])
	run, ok := components[name]
	if !ok {
		fmt.Fprintf(os.Stderr, "k8s: called as %q: want etcd, kubectl, kubelet, kube-apiserver, kube-controller-manager or kube-scheduler\n",
			name)
		os.Exit(2)
	}
	run()
}
