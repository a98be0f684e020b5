// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"bytes"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/rm"
)

// TestCheckVersion: the guard says whether a library fits the driver, and the driver, which would log each that does not, is never asked.
func TestCheckVersion(t *testing.T) {
	for _, x := range []struct {
		name, node string
		said       string
		want       unix.Errno
		told       string
	}{
		{"the driver's", fakeControl, testVersion, 0, testVersion},
		{"another", fakeControl, "1.2.3", unix.EINVAL, testVersion},
		{"on a GPU's node", "/dev/zero", testVersion, unix.EINVAL, testVersion},
	} {
		d := &fakeDriver{}
		c := newFakeCall(t, newFakeGuard(t, d), x.node)
		p := make([]byte, rm.CheckVersionSize)
		copy(p[rm.CheckVersionString:], x.said)
		rep := c.escape(rm.EscCheckVersion, p)
		told, _, _ := bytes.Cut(p[rm.CheckVersionString:], []byte{0})
		if rep != fail(x.want) || string(told) != x.told || len(d.calls) != 0 {
			t.Errorf("%s: %+v, told %q, %d driver calls", x.name, rep, told, len(d.calls))
		}
	}
}
