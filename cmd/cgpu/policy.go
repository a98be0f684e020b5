// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/urfave/cli/v2"

	"github.com/opencgpu/cgpu/pkg/control"
	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/node"
	"github.com/opencgpu/cgpu/pkg/sched"
	"github.com/opencgpu/cgpu/pkg/terminal"
	"github.com/opencgpu/cgpu/pkg/view"
)

func policyCommand() *cli.Command {
	return &cli.Command{
		Name:      "policy",
		Usage:     "show or change how the containers of a GPU share its time",
		ArgsUsage: "[GPU|all [POLICY]]",
		Description: "GPU is an index, a UUID or a unique beginning of one, or several with commas between them. POLICY is fair, preempt, " +
			"weight-preempt, fixed, soft or\n" +
			"native, or its number, 0 to 5; docs/policies.md tells what each does. A change takes effect at once, and what\n" +
			"the GPU's containers were promised must fit it. It lasts until the next boot; cgpu.toml has the policy of\n" +
			"GPUs that were never changed.\n\n" +
			"PROMISED is the sum of the hard caps, which never passes 100 %.\n\n" +
			"Examples:\n   cgpu policy\n   cgpu policy 0 fixed --max-inst 8\n   cgpu policy all --prio-ratio 80",
		Flags: []cli.Flag{
			&cli.IntFlag{Name: "max-inst", Usage: fmt.Sprintf("`N`, 1 to %d: containers on the GPU", sched.MaxMaxInst), DefaultText: "unchanged"},
			&cli.IntFlag{Name: "prio-ratio", Usage: fmt.Sprintf("`N`, %d to %d percent: the most for high-priority containers while others want it",
				sched.MinPrioRatio, sched.MaxPrioRatio), DefaultText: "unchanged"},
			outputFlag(),
		},
		Action: func(c *cli.Context) error {
			change, err := cardOf(c)
			if err != nil {
				return usageError{fmt.Errorf("policy: %w", err)}
			}
			inJSON, err := wantsJSON(c)
			if err != nil {
				return err
			}
			runDir := device.RunDir()
			t, err := node.Load(runDir)
			if err != nil {
				return err
			}
			gpus := t.GPUs
			if names := c.Args().First(); names != "" && names != "all" {
				if gpus, err = node.FindGPUs(t, names); err != nil {
					return fmt.Errorf("policy: %w", err)
				}
			}
			if change != nil {
				w := c.App.Writer
				if inJSON {
					w = io.Discard
				}
				for _, g := range gpus {
					if err := setCard(w, runDir, t, g, change); err != nil {
						return err
					}
				}
				if !inJSON {
					return nil
				}
			}
			list, err := view.PoliciesOf(t, gpus, ledger.Open(runDir))
			if err != nil {
				return err
			}
			if inJSON {
				return terminal.EncodeJSON(c.App.Writer, list, "  ")
			}
			return view.PrintPolicies(c.App.Writer, list)
		},
	}
}

// cardOf reads what to change; nil is nothing.
func cardOf(c *cli.Context) (func(*sched.Card), error) {
	policy, maxInst, ratio := c.NArg() == 2, c.IsSet("max-inst"), c.IsSet("prio-ratio")
	switch {
	case c.NArg() > 2:
		return nil, fmt.Errorf("%q: want [GPU|all [POLICY]]; see cgpu policy --help", c.Args().Get(2))
	case c.NArg() == 0 && (maxInst || ratio):
		return nil, errors.New("of which GPU? Name one, or all")
	case !policy && !maxInst && !ratio:
		return nil, nil
	}
	want := sched.Card{Policy: sched.PolicyPreempt, MaxInst: 1, PrioRatio: sched.DefaultPrioRatio} // in bounds, for Validate
	if policy {
		p, err := sched.ParsePolicy(c.Args().Get(1))
		if err != nil {
			return nil, err
		}
		want.Policy = p
	}
	if maxInst {
		want.MaxInst = c.Int("max-inst")
	}
	if ratio {
		want.PrioRatio = c.Int("prio-ratio")
	}
	if err := want.Validate(); err != nil {
		return nil, fmt.Errorf("--%w", err) // it begins with the flag's name
	}
	return func(card *sched.Card) {
		if policy {
			card.Policy = want.Policy
		}
		if maxInst {
			card.MaxInst = want.MaxInst
		}
		if ratio {
			card.PrioRatio = want.PrioRatio
		}
	}, nil
}

// setCard changes one GPU and says what is different.
func setCard(w io.Writer, runDir string, t *device.Table, g device.GPU, change func(*sched.Card)) error {
	diffs, err := control.ChangePolicy(runDir, t, g, change)
	if r, ok := errors.AsType[*ledger.Refusal](err); ok {
		return fmt.Errorf("policy: %s: %s; %s", r.GPU, r.Reason, r.Remedy)
	}
	if err != nil {
		return err
	}
	if len(diffs) == 0 {
		diffs = []string{"nothing to change"}
	}
	_, err = fmt.Fprintf(w, "GPU %d (%s): %s\n", g.Index, view.ShortUUID(g.UUID), strings.Join(diffs, ", "))
	return err
}
