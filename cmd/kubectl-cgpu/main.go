// SPDX-License-Identifier: Apache-2.0

// Kubectl-cgpu is a plugin of kubectl: `kubectl cgpu inspect` shows who has what of the cluster's GPUs, `kubectl cgpu top` what
// is used. It reads with the rights of its user and changes nothing.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/pflag"

	"github.com/opencgpu/cgpu/pkg/suggest"
)

var version = "unknown"

const usage = `kubectl cgpu shows how the cluster's GPUs are shared.

Usage:
  kubectl cgpu inspect [NODE...] [-d] [-o wide|json]   what was promised to whom, and who waits
  kubectl cgpu top [pods|nodes] [NODE...] [-o json]    what is used now
  kubectl cgpu version

kubectl cgpu COMMAND --help lists a command's flags.
`

// usageError is answered with exit status 2.
type usageError struct{ error }

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	err := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	var wrong usageError
	switch {
	case err == nil:
	case errors.Is(err, pflag.ErrHelp):
	case errors.As(err, &wrong):
		fmt.Fprintln(os.Stderr, "kubectl cgpu:", err)
		os.Exit(2)
	default:
		fmt.Fprintln(os.Stderr, "kubectl cgpu:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, w, warnings io.Writer) error {
	if len(args) == 0 {
		_, err := io.WriteString(w, usage)
		return err
	}
	switch args[0] {
	case "inspect":
		return inspect(ctx, args[1:], w, warnings)
	case "top":
		return top(ctx, args[1:], w, warnings)
	case "version":
		_, err := fmt.Fprintln(w, "kubectl-cgpu", version)
		return err
	case "__complete": // kubectl_complete-cgpu asks
		_, err := io.WriteString(w, complete(args[1:]))
		return err
	case "help", "-h", "--help":
		_, err := io.WriteString(w, usage)
		return err
	}
	return usageError{fmt.Errorf("%q: want inspect, top or version%s; see kubectl cgpu --help", args[0],
		suggest.DidYouMean(args[0], []string{"inspect", "top", "version", "help"}))}
}

// complete answers in the way of kubectl's completion of plugins: candidates, then a directive (4: no file names).
func complete(args []string) string {
	var words []string
	last := ""
	if len(args) > 0 {
		last = args[len(args)-1]
	}
	switch {
	case len(args) <= 1:
		words = []string{"inspect", "top", "version"}
	case args[0] == "top" && len(args) == 2:
		words = []string{"pods", "nodes"}
	case len(args) > 2 && (args[len(args)-2] == "-o" || args[len(args)-2] == "--output"):
		words = []string{"wide", "json"}
	}
	var b strings.Builder
	for _, word := range words {
		if strings.HasPrefix(word, last) {
			b.WriteString(word + "\n")
		}
	}
	return b.String() + ":4\n"
}
