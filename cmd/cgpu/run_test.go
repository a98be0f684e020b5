// SPDX-License-Identifier: Apache-2.0

package main

import (
	"reflect"
	"strings"
	"testing"

	"github.com/urfave/cli/v2"

	"github.com/opencgpu/cgpu/pkg/quota"
)

// asRun parses a command line of cgpu run and gives it to do instead of running anything.
func asRun(t *testing.T, line string, do func(*cli.Context)) {
	t.Helper()
	a := app()
	for _, c := range a.Commands {
		if c.Name == runName {
			c.Action = func(c *cli.Context) error { do(c); return nil }
		}
	}
	if err := run(a, append([]string{"cgpu", runName}, strings.Fields(line)...)); err != nil {
		t.Errorf("%s: %v", line, err)
	}
}

func TestRunQuota(t *testing.T) {
	fixed := func(size quota.Bytes) quota.Memory { return quota.Memory{Fixed: size} }
	for _, test := range []struct {
		line string
		want quota.Quota
		args string
		err  string
	}{
		{line: "--memory 6GiB -- x", want: quota.Quota{Memory: fixed(6 * quota.GiB),
			Slice: quota.Slice{Share: quota.Share{Priority: quota.PriorityDefault}}}, args: "x"},
		{line: "--memory 6GiB --spill 1GiB --weight 3 --percent 40 --priority high --gpu 1,GPU-ab --no-limiter x",
			want: quota.Quota{Memory: fixed(6 * quota.GiB),
				Slice: quota.Slice{Spill: quota.GiB, Share: quota.Share{Weight: 3, Percent: 40, Priority: quota.PriorityHigh}}, NoLimiter: true,
				Visible: quota.Selector{IDs: []string{"1", "GPU-ab"}}}, args: "x"},
		{line: "--memory 1GiB --gpu all x", want: quota.Quota{Memory: fixed(quota.GiB),
			Slice: quota.Slice{Share: quota.Share{Priority: quota.PriorityDefault}}, Visible: quota.Selector{All: true}}, args: "x"},
		// What follows the command is the command's.
		{line: "--memory 1GiB python3 train.py --weight 3 --memory 2",
			want: quota.Quota{Memory: fixed(quota.GiB), Slice: quota.Slice{Share: quota.Share{Priority: quota.PriorityDefault}}},
			args: "python3 train.py --weight 3 --memory 2"},
		{line: "--memory 1GiB -- -x", want: quota.Quota{Memory: fixed(quota.GiB),
			Slice: quota.Slice{Share: quota.Share{Priority: quota.PriorityDefault}}}, args: "-x"},
		{line: "--memory 1GiB --domain a --threads 30 x", want: quota.Quota{Memory: fixed(quota.GiB), Domain: "a", Threads: 30,
			Slice: quota.Slice{Share: quota.Share{Priority: quota.PriorityDefault}}}, args: "x"},
		{line: "x", err: "want --memory SIZE"},
		{line: "--weight 2 x", err: "want --memory SIZE"},
		{line: "--memory 6TB x", err: `--memory "6TB": is no size`},
		{line: "--memory 6 x", want: quota.Quota{Memory: fixed(6 * quota.GiB),
			Slice: quota.Slice{Share: quota.Share{Priority: quota.PriorityDefault}}}, args: "x"},
		{line: "--memory 1GiB --spill x x", err: `--spill "x"`},
		{line: "--memory 1GiB --percent 101 x", err: `--percent "101"`},
		{line: "--memory 1GiB --priority low x", err: `--priority "low"`},
		{line: "--memory 1GiB --domain a --threads 0 x", err: `--threads "0": want 1 to 100`},
		{line: "--memory 1GiB --domain a --threads 30% x", err: `--threads "30%": want 1 to 100`},
		{line: "--memory 1GiB --threads 30 x", err: `--threads "30": counts in a trust domain only`},
		{line: "--memory 1GiB --gpu ,1 x", err: `--gpu ",1"`},
		{line: "--memory 1GiB --gpu= x", err: `--gpu ""`},
	} {
		called := false
		asRun(t, test.line, func(c *cli.Context) {
			called = true
			q, err := runQuota(c)
			if (err == nil) != (test.err == "") || err != nil && !strings.Contains(err.Error(), test.err) {
				t.Errorf("%s: %v, want %q", test.line, err, test.err)
			}
			if err != nil {
				return
			}
			q.Asked = nil
			if !reflect.DeepEqual(*q, test.want) {
				t.Errorf("%s: %+v, want %+v", test.line, *q, test.want)
			}
			if got := strings.Join(c.Args().Slice(), " "); got != test.args {
				t.Errorf("%s: command %q, want %q", test.line, got, test.args)
			}
		})
		if !called {
			t.Errorf("%s: not run", test.line)
		}
	}
}
