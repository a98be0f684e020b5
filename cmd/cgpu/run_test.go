// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"github.com/urfave/cli/v2"

	"github.com/opencgpu/cgpu/pkg/ledger"
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
		{line: "x", err: "want --memory SIZE"},
		{line: "--weight 2 x", err: "want --memory SIZE"},
		{line: "--memory 6TB x", err: `--memory "6TB": is no size`},
		{line: "--memory 6 x", want: quota.Quota{Memory: fixed(6 * quota.GiB),
			Slice: quota.Slice{Share: quota.Share{Priority: quota.PriorityDefault}}}, args: "x"},
		{line: "--memory 1GiB --spill x x", err: `--spill "x"`},
		{line: "--memory 1GiB --percent 101 x", err: `--percent "101"`},
		{line: "--memory 1GiB --priority low x", err: `--priority "low"`},
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

// TestRunRefused: a refusal is about a flag, and no variable of containers is in it.
func TestRunRefused(t *testing.T) {
	gpu := ledger.GPU{UUID: "GPU-1", Index: 0}
	for _, test := range []struct {
		err  error
		want string
	}{
		{&quota.Error{Variable: "ALIYUN_COM_GPU_MEM_CONTAINER", Value: "99GiB", Reason: "is too much", Remedy: "or set ALIYUN_COM_GPU_MEM_DEV"},
			`run: --memory "1GiB": is too much; ask for less`},
		{&quota.Error{Variable: "ALIYUN_COM_GPU_VISIBLE_DEVICES", Value: "7", Reason: "is none"},
			`run: --gpu "7": is none; cgpu smi lists the GPUs of this machine`},
		{&quota.Error{Variable: "ALIYUN_COM_GPU_CORE_PERCENTAGE", Value: "30", Reason: "is not free", Remedy: "wait"},
			`run: --percent "30": is not free; wait`},
		{&quota.Error{Variable: "CGPU_MEM_SPILL", Reason: "is not free"}, `run: --spill "2GiB": is not free`},
		{fmt.Errorf("x: %w", &ledger.Refusal{GPU: gpu, Reason: "asked for much", Remedy: "wait"}),
			`run: --memory "1GiB": GPU 0 (GPU-1): asked for much; wait`},
		{&ledger.Refusal{Reason: "asked for much", Remedy: "wait"}, `run: --memory "1GiB": asked for much; wait`},
		{&ledger.Refusal{GPU: gpu, Time: true, Reason: "its policy is native", Remedy: "choose another"},
			`GPU 0 (GPU-1): its policy is native; choose another`},
		{errors.New("other"), "other"},
	} {
		asRun(t, "--memory 1GiB --gpu 7 --percent 30 --spill 2GiB x", func(c *cli.Context) {
			if got := runRefused(c, test.err).Error(); got != test.want {
				t.Errorf("got  %s\nwant %s", got, test.want)
			}
		})
	}
}

// TestRunFlags holds the table of flags to the names that pkg/quota uses in its refusals.
func TestRunFlags(t *testing.T) {
	env := map[string]string{}
	for _, f := range runFlags {
		env[f.variable] = map[string]string{"memory": "1GiB", "gpu": "0"}[f.flag]
		if env[f.variable] == "" {
			env[f.variable] = "1"
		}
	}
	var list []string
	for name, value := range env {
		list = append(list, name+"="+value)
	}
	q, err := quota.FromSpec(list, nil)
	if err != nil {
		t.Fatal(err)
	}
	for name := range env {
		if _, ok := q.Asked[name]; !ok {
			t.Errorf("quota does not know %s", name)
		}
	}
}
