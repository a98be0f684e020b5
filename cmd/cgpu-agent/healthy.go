// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"

	"github.com/opencgpu/cgpu/pkg/agent"
)

const healthyName = "healthy"

// healthy is the kubelet's probe, run in the agent's container: who reaches the agent's port has no part in it.
func healthy(f flags, args []string) error {
	set := flag.NewFlagSet(healthyName, flag.ContinueOnError)
	set.SetOutput(io.Discard)
	wantReady := set.Bool("ready", false, "")
	err := set.Parse(args)
	switch {
	case errors.Is(err, flag.ErrHelp):
		printHelp(os.Stdout)
		return nil
	case err != nil:
		return usageError{err}
	case set.NArg() > 0:
		return usageError{fmt.Errorf("%q: want no arguments; see cgpu-agent --help", set.Arg(0))}
	}
	node, err := f.node()
	if err != nil {
		return err
	}
	alive, ready := agent.AskProbe(agent.ProbeSocket(node, f.values["pod-uid"]))
	switch {
	case alive != nil:
		return alive
	case *wantReady:
		return ready
	}
	return nil
}

// node is the node as the flags have it, or the host's name.
func (f flags) node() (string, error) {
	if name := f.values["node-name"]; name != "" {
		return name, nil
	}
	return hostName()
}
