// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"slices"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/rm"
)

// TestExecute: what becomes of a plan, whatever the driver says.
func TestExecute(t *testing.T) {
	const refused = rm.StatusNoMemory
	for name, test := range map[string]struct {
		plan     plan
		away     bool // the caller
		statuses []uint32
		errno    syscall.Errno
		commit   uint32 // a status that the commit ends with
		retry    bool
		want     []string
		asked    int
		rep      reply
		status   uint32
	}{
		"answered": {plan: answer(fail(unix.EIO)), want: []string{"done"}, rep: fail(unix.EIO)},
		"done":     {plan: pass(), statuses: []uint32{0}, want: []string{"commit", "done"}, asked: 1},
		"away":     {plan: pass(), away: true, want: []string{"cancel", "done"}},
		"refused":  {plan: pass(), statuses: []uint32{refused}, want: []string{"cancel", "done"}, asked: 1, status: refused},
		"errno": {plan: pass(), errno: unix.EIO, statuses: []uint32{0}, want: []string{"cancel", "done"},
			asked: 1, rep: fail(unix.EIO)},
		"another way": {plan: pass(), statuses: []uint32{refused, 0}, retry: true,
			want: []string{"cancel", "retry", "again", "done"}, asked: 2},
		"refused in both": {plan: pass(), statuses: []uint32{refused, refused}, retry: true, want: []string{"cancel", "retry", "done"},
			asked: 2, status: refused},
		"errno, no retry": {plan: pass(), statuses: []uint32{0}, errno: unix.EIO, retry: true, want: []string{"cancel", "done"},
			asked: 1, rep: fail(unix.EIO)},
		"committed badly": {plan: pass(), statuses: []uint32{0, 0}, commit: refused, retry: true,
			want: []string{"commit", "retry", "again", "done"}, asked: 2},
	} {
		t.Run(name, func(t *testing.T) {
			asked := 0
			d := &fakeDriver{answer: func(_ Target, call *rm.Call) syscall.Errno {
				rm.PutU32(call.Outer, rm.ControlStatus, test.statuses[asked])
				asked++
				return test.errno
			}}
			f := newFakeCall(t, newFakeGuard(t, d), fakeControl)
			c := &f.trappedCall
			if test.away {
				c.listener = &listener{fd: -1}
			}
			c.call = rm.Call{Cmd: uint32(testCmd(rm.EscControl, rm.ControlSize)), Outer: make([]byte, rm.ControlSize)}
			var got []string
			say := func(what string) func() { return func() { got = append(got, what) } }
			p := test.plan
			p.cancel, p.done = say("cancel"), say("done")
			p.commit = func() { say("commit")(); c.status(test.commit) }
			if test.retry {
				p.retry = func(uint32) (plan, bool) {
					say("retry")()
					return plan{ask: true, commit: func() { say("again")(); c.status(rm.StatusOK) }}, true
				}
			}
			if rep := c.execute(p); rep != test.rep {
				t.Errorf("reply %+v, want %+v", rep, test.rep)
			}
			if !slices.Equal(got, test.want) || asked != test.asked {
				t.Errorf("%q, the driver was asked %d times; want %q, %d times", got, asked, test.want, test.asked)
			}
			if s := c.statusWord(); s != test.status {
				t.Errorf("status %#x, want %#x", s, test.status)
			}
		})
	}
}
