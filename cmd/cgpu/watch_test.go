// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"
	"time"

	"github.com/urfave/cli/v2"
)

func TestInterval(t *testing.T) {
	for args, want := range map[string]time.Duration{
		"":                    0,
		"-o wide":             0,
		"--watch":             time.Second,
		"--watch -o wide":     time.Second,
		"--watch 2":           2 * time.Second,
		"--watch=2":           2 * time.Second,
		"-o wide --watch 0.5": 500 * time.Millisecond,
		"2 --watch":           2 * time.Second,
	} {
		c := smiCommand()
		got := time.Duration(-1)
		c.Action = func(c *cli.Context) (err error) {
			got, err = interval(c)
			return err
		}
		a := app()
		a.Commands = []*cli.Command{c}
		if err := run(a, append([]string{"cgpu", "smi"}, strings.Fields(args)...)); err != nil || got != want {
			t.Errorf("%q: %v, %v; want %v", args, got, err, want)
		}
	}
}
