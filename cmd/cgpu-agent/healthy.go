package main

import (
	"fmt"

	"github.com/urfave/cli/v2"

	"github.com/opencgpu/cgpu/pkg/agent"
)

// healthyCommand is the kubelet's probe, run in the agent's container: who reaches the agent's port has no part in it.
func healthyCommand() *cli.Command {
	return &cli.Command{
		Name:  "healthy",
		Usage: "asks the agent of this node and pod, which runs, whether it is well: exit status 0, or 1 and why not",
		Description: "It needs what tells agents apart: --node-name and --pod-uid, or their variables, before the word healthy. An exec probe has\n" +
			"the variables of the container.",
		Flags: []cli.Flag{&cli.BoolFlag{Name: "ready", Usage: "whether every front end serves, too"}},
		OnUsageError: func(_ *cli.Context, err error, _ bool) error {
			return usageError{err}
		},
		Action: func(c *cli.Context) error {
			if c.Args().Present() {
				return usageError{fmt.Errorf("%q: want no arguments; see cgpu-agent healthy --help", c.Args().First())}
			}
			node, err := nodeName(c)
			if err != nil {
				return err
			}
			alive, ready := agent.AskProbe(agent.ProbeSocket(node, c.String("pod-uid")))
			switch {
			case alive != nil:
				return alive
			case c.Bool("ready") && ready != nil:
				return ready
			}
			return nil
		},
	}
}

// nodeName is the node as the flags have it, or the host's name.
func nodeName(c *cli.Context) (string, error) {
	if name := c.String("node-name"); name != "" {
		return name, nil
	}
	return hostName()
}
