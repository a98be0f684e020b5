// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"flag"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"github.com/opencgpu/cgpu/test/interrupt"
)

// cmdSignals allocates and frees on one thread while a timer interrupts that thread, half of the time with SA_RESTART and
// half without. Each call must have happened exactly once however often it was interrupted and issued again.
func cmdSignals(args []string) error {
	fs := flag.NewFlagSet("signals", flag.ExitOnError)
	every := fs.Duration("timer", 4*time.Millisecond, "time between signals")
	seconds := fs.Float64("seconds", 5, "how long")
	sizeArg := fs.String("size", "2MiB", "size of an allocation")
	_ = fs.Parse(args)
	size, err := parseSize(*sizeArg)
	if err != nil {
		return err
	}
	var interrupted atomic.Int64
	counting := func(fd int, cmd uintptr, arg unsafe.Pointer) syscall.Errno {
		for {
			errno := ioctl(fd, cmd, arg)
			if errno != syscall.EINTR {
				return errno
			}
			interrupted.Add(1)
		}
	}
	c, _, before, err := openCounted(counting)
	if err != nil {
		return err
	}
	defer c.close()

	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	seen := make(chan os.Signal, 1024)
	signal.Notify(seen, syscall.SIGALRM) // Go's handler, with SA_RESTART
	var signals atomic.Int64
	go func() {
		for range seen {
			signals.Add(1)
		}
	}()
	stop, err := interrupt.Thread(*every)
	if err != nil {
		return err
	}
	var calls int64
	phase := time.Duration(*seconds * float64(time.Second) / 2)
	for _, restart := range []bool{true, false} {
		if err := interrupt.Restart(syscall.SIGALRM, restart); err != nil {
			return err
		}
		for end := time.Now().Add(phase); time.Now().Before(end); calls += 2 {
			h, _, err := c.memory(size)
			if err != nil {
				return fmt.Errorf("call %d, SA_RESTART %v: %w", calls, restart, err)
			}
			if err := c.free(h); err != nil {
				return fmt.Errorf("call %d, SA_RESTART %v: %w", calls+1, restart, err)
			}
			if calls%64 == 0 && c.exists(h) {
				return fmt.Errorf("object %#x is still there after its free", h)
			}
		}
	}
	stop()
	_, after, err := c.usage()
	if err != nil {
		return err
	}
	print("calls=%d\nsignals=%d\neintr=%d", calls, signals.Load(), interrupted.Load())
	print("free_before=%d\nfree_after=%d", before, after)
	if before != after {
		return fmt.Errorf("free memory was %v before and is %v after: a call was lost or done twice", before, after)
	}
	if signals.Load() == 0 {
		return fmt.Errorf("no signal came")
	}
	return nil
}
