// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strings"
	"testing"

	"github.com/urfave/cli/v2"

	"github.com/opencgpu/cgpu/pkg/node/nodetest"
)

func TestFilter(t *testing.T) {
	v := nodetest.Busy(t)
	v.GPUs[0].VGPUs[1].Name = "web" // bbbb
	for args, want := range map[string]string{
		"":                                 "0:aaaa,bbbb,cccc,dddd,eeee,ffff,0000 1:aaaa,eeee",
		"--gpu 1":                          "1:aaaa,eeee",
		"--gpu 1 --gpu GPU-0":              "0:aaaa,bbbb,cccc,dddd,eeee,ffff,0000 1:aaaa,eeee",
		"--container aaa":                  "0:aaaa 1:aaaa",
		"--container web --container eeee": "0:bbbb,eeee 1:eeee",
		"--container aaa --gpu 0":          "0:aaaa",
		"--filter state=paused":            "0:eeee",
		"--filter state=guard-dead":        "0:cccc,ffff",
		"--filter state=no\u00a0answer":    "error",
		"--filter priority=high":           "1:aaaa",
		"--filter policy=weight-preempt":   "1:aaaa,eeee",
		"--filter enforcement=preload":     "",
		"--filter state=paused --gpu 1":    "",
		"--filter state=running --filter state=paused --filter policy=preempt": "0:aaaa,eeee",
		"--filter state=busy": "error: --filter \"state=busy\": want state= one of running, paused, starting, gone, no-answer, guard-dead, " +
			"no-page",
		"--filter colour=red": "error: --filter \"colour=red\": want KEY=VALUE with one of the keys state, priority, policy, enforcement",
		"--filter state":      "error",
		"--gpu 7":             `error: --gpu: GPU "7": there is none`,
		"--container nobody":  `error: --container "nobody": no container`,
		"--container=":        `error: --container "": want`,
	} {
		got := ""
		c := &cli.Command{Name: "smi", Flags: filterFlags(), Action: func(c *cli.Context) error {
			s, err := selectionOf(c)
			if err != nil {
				return err
			}
			v, err := s.Apply(v)
			var list []string
			for _, g := range v.GPUs {
				var ids []string
				for _, x := range g.VGPUs {
					ids = append(ids, x.ID[:4])
				}
				list = append(list, fmt.Sprintf("%d:%s", g.Index, strings.Join(ids, ",")))
			}
			got = strings.Join(list, " ")
			return err
		}}
		a := app()
		a.Commands = []*cli.Command{c}
		if err := run(a, append([]string{"cgpu", "smi"}, strings.Fields(args)...)); err != nil {
			got = "error: " + err.Error()
		}
		if got != want && (!strings.HasPrefix(want, "error") || !strings.HasPrefix(got, want)) {
			t.Errorf("%s: %s\nwant %s", args, got, want)
		}
	}
	if v.GPUs[0].Used == 0 || len(v.GPUs[0].VGPUs) != 7 {
		t.Error("a selection changes what it selects from")
	}
}
