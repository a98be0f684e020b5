// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io"

	"github.com/spf13/pflag"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/opencgpu/cgpu/pkg/suggest"
)

// connection is what all commands take of kubectl's flags.
type connection struct {
	file      string
	overrides clientcmd.ConfigOverrides
}

// flags adds kubectl's flags of the connection to a command's: --kubeconfig, --context, --namespace, --token and the like.
func (c *connection) flags(f *pflag.FlagSet) {
	f.StringVar(&c.file, "kubeconfig", "", "`file` to use instead of KUBECONFIG and ~/.kube/config")
	clientcmd.BindOverrideFlags(&c.overrides, f, clientcmd.RecommendedConfigOverrideFlags(""))
}

// client connects. namespace is empty where the user named none: kubeconfig's default is for what makes objects, this only reads.
func (c *connection) client() (client kubernetes.Interface, namespace string, err error) {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = c.file
	config, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, &c.overrides).ClientConfig()
	if err != nil {
		return nil, "", fmt.Errorf("kubeconfig: %w", err)
	}
	config.ContentType = "application/vnd.kubernetes.protobuf"
	config.AcceptContentTypes = "application/vnd.kubernetes.protobuf,application/json"
	config.WarningHandler = rest.NoWarnings{}
	config.UserAgent = "kubectl-cgpu/" + version
	config.QPS, config.Burst = 100, 200 // one request for each node, with top
	client, err = kubernetes.NewForConfig(config)
	return client, c.overrides.Context.Namespace, err
}

// newFlags is a command's set; what it prints for --help goes to w.
func newFlags(w io.Writer, synopsis, about string) *pflag.FlagSet {
	f := pflag.NewFlagSet("kubectl cgpu", pflag.ContinueOnError)
	f.SetOutput(w)
	f.Usage = func() { fmt.Fprintf(w, "Usage:\n  %s\n\n%s\n\nFlags:\n%s", synopsis, about, f.FlagUsages()) }
	return f
}

// parse reads flags, which may stand anywhere.
func parse(f *pflag.FlagSet, args []string) error {
	if err := f.Parse(args); err != nil {
		if errors.Is(err, pflag.ErrHelp) {
			return err
		}
		if unknown, ok := errors.AsType[*pflag.NotExistError](err); ok && unknown.GetSpecifiedShortnames() == "" {
			var known []string
			f.VisitAll(func(flag *pflag.Flag) { known = append(known, "--"+flag.Name) })
			name := "--" + unknown.GetSpecifiedName()
			return usageError{fmt.Errorf("%s: no such flag%s", name, suggest.DidYouMean(name, known))}
		}
		return usageError{err}
	}
	return nil
}
