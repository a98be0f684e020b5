// SPDX-License-Identifier: Apache-2.0

package gpusched

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/opencgpu/cgpu/pkg/peerpage"
)

// TestRejoin: who goes on in another program's place has that one's entry, and one only; where it cannot be had, he does not go on.
func TestRejoin(t *testing.T) {
	c := newFakeContainer(t, 1)
	x := c.gpu()
	x.joinPage(peerpage.Join)
	list, rescuer := c.State()
	next := newFakeContainer(t, 1)
	next.Config = c.Config
	path := peerpage.Path(c.Config.RunDir, c.Config.GPUs[0].UUID)
	away := filepath.Join(t.TempDir(), "page")
	if err := os.Rename(path, away); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(path, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := next.Rejoin(list, rescuer); err == nil {
		t.Error("it goes on without the page, and would take a second entry")
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(away, path); err != nil {
		t.Fatal(err)
	}
	if err := next.Rejoin(list, rescuer); err != nil || next.gpu().page == nil || next.gpu().page.Place() != list[0].Place {
		t.Errorf("%v; want place %d", err, list[0].Place)
	}
	if n := x.page.Living(); n != 1 {
		t.Errorf("%d entries", n)
	}
}
