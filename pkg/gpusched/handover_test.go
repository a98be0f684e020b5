// SPDX-License-Identifier: Apache-2.0

package gpusched

import (
	"os"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/guard/handover"
)

// TestRestKeepsOffThePage: who joins the GPU's page while the scheduler rests would have a place that its successor does not know of, and
// that counts for as long as the process lives.
func TestRestKeepsOffThePage(t *testing.T) {
	c := newFakeContainer(t, 1)
	wake, ok := c.Rest()
	if !ok {
		t.Fatal("it does not rest")
	}
	x := c.gpus[0]
	x.awake()
	go x.run()
	time.Sleep(20 * time.Millisecond) // it may come later: then nothing is seen, and nothing is wrong
	if list, _ := c.State(); list[0].Place != 0 {
		t.Error("it has joined the page while it rests")
	}
	wake()
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
		if list, _ := c.State(); list[0].Place != 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal("it never joins the page")
		}
	}
}

// TestRejoinKeepsThePipe: the rescuer takes the end of its pipe for the guard's. So that stays open for the program before, should the one
// that goes on come no further.
func TestRejoinKeepsThePipe(t *testing.T) {
	c := newFakeContainer(t, 1)
	c.notes()
	read, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer read.Close()
	if err := c.Rejoin(nil, &handover.Rescuer{Pipe: int(write.Fd()), Gone: true}); err != nil {
		t.Fatal(err)
	}
	if err := c.rescue.pipe.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := write.Stat(); err != nil {
		t.Error(err)
	}
}
