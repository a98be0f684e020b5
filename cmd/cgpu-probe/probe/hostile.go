// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"iter"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"github.com/opencgpu/cgpu/pkg/quota"
)

type hostileOptions struct {
	tries int
	keep  bool // keep objects and wait at the end, so that a test can compare ledger and driver
	// paused: somebody pauses the container once a case says that it is ready.
	paused bool
	busy   time.Duration // for how long a case keeps the guard at work, for somebody who measures it
}

// raceTime bounds a race. On a machine that is busy with other things it makes fewer attempts than asked for; each race
// prints how many.
const raceTime = 15 * time.Second

// attempts counts the attempts of a race.
func (o hostileOptions) attempts() iter.Seq[int] {
	return func(yield func(int) bool) {
		start := time.Now()
		for i := range o.tries {
			if i%256 == 0 && time.Since(start) > raceTime || !yield(i) {
				return
			}
		}
	}
}

// errSkip says that a case makes no sense here.
var errSkip = errors.New("skipped")

// caseTime is how long a case may take before it counts as hung.
const caseTime = 120 * time.Second

func cmdHostile(args []string) error {
	fs := flag.NewFlagSet("hostile", flag.ExitOnError)
	tries := fs.Int("tries", 100000, "attempts of each race")
	keep := fs.Bool("keep", false, "keep what was got and wait for a signal")
	paused := fs.Bool("paused", false, "somebody pauses this container once case paused prints ready=1")
	busy := fs.Duration("busy", 0, "for how long the cases that keep the guard at work do so; 0: not at all")
	timeout := fs.Duration("timeout", caseTime, "a case that takes longer counts as hung")
	inside := fs.Bool("inside", false, "run the case in this process")
	name := arg(args, 0)
	if name != "" {
		args = args[1:]
	}
	_ = fs.Parse(args)
	var failed int
	found := false
	var free quota.Bytes
	if name == "all" {
		free = idleMemory()
	}
	for _, a := range attacks() {
		if name == "list" {
			print("%s", a.name)
			found = true
		}
		if name != a.name && name != "all" {
			continue
		}
		found = true
		if *inside {
			return a.run(hostileOptions{*tries, *keep, *paused, *busy})
		}
		// A process of its own: a case may be killed or hang.
		err := a.start(hostileOptions{*tries, *keep, *paused, *busy}, *timeout)
		if err == nil {
			err = waitIdle(free)
		}
		if errors.Is(err, errSkip) {
			print("ok %s (%v)", a.name, err)
		} else if err != nil {
			print("FAIL %s %v", a.name, err)
			failed++
		} else {
			print("ok %s", a.name)
		}
	}
	if !found {
		return fmt.Errorf("unknown case %q; see cgpu-probe hostile list", name)
	}
	if failed > 0 {
		return fmt.Errorf("%d cases failed", failed)
	}
	return nil
}

// idleMemory is what is free before the first case; 0 where nothing can tell.
func idleMemory() quota.Bytes {
	c, _, free, err := openCounted(patient)
	if err != nil {
		return 0
	}
	defer c.close()
	return free
}

// waitIdle waits until a case has given back what it held, which takes a moment after the end of its process. The next
// case would else see memory come back while it measures. What does not come back is a leak.
func waitIdle(free quota.Bytes) error {
	deadline := time.Now().Add(20 * time.Second)
	for {
		now := idleMemory()
		if now >= free {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("left %v of memory behind", free-now)
		}
		sleep10ms()
	}
}

// skipStatus is the exit status of a case that makes no sense here.
const skipStatus = 77

func (a attack) start(o hostileOptions, timeout time.Duration) error {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, "/proc/self/exe", "hostile", a.name, "--inside", "--tries", strconv.Itoa(o.tries),
		"--keep="+strconv.FormatBool(o.keep), "--paused="+strconv.FormatBool(o.paused), "--busy="+o.busy.String())
	cmd.WaitDelay = 5 * time.Second
	if a.name == "env" {
		cmd.Env = []string{}
	}
	var diag strings.Builder
	cmd.Stdout, cmd.Stderr = os.Stderr, &diag
	err := cmd.Run()
	state := cmd.ProcessState
	if ctx.Err() != nil {
		return fmt.Errorf("hung: not over after %v", timeout)
	}
	if err == nil {
		return nil
	}
	if state == nil {
		return err
	}
	ws, _ := state.Sys().(syscall.WaitStatus)
	lines := strings.Split(strings.TrimSpace(diag.String()), "\n")
	// Go turns a SIGSEGV or SIGSYS into a panic and status 2, unless the kernel killed the process.
	crashed := ws.Signaled() || strings.Contains(diag.String(), "SIGSYS") || strings.Contains(diag.String(), "SIGSEGV")
	switch {
	case a.killed && crashed:
		time.Sleep(time.Second) // while the guard ends what has the driver open (endAll), nothing here may open it
		return nil
	case ws.Exited() && ws.ExitStatus() == skipStatus:
		return fmt.Errorf("%w: %s", errSkip, lines[len(lines)-1])
	case ws.Signaled():
		return fmt.Errorf("killed by %v", ws.Signal())
	}
	return errors.New(lines[len(lines)-1])
}

// skip ends a case that makes no sense here.
func skip(why string) error {
	fmt.Fprintln(os.Stderr, why)
	os.Exit(skipStatus)
	return nil
}

// holds checks that a way of allocating is either refused or charged: more than the GPU has is never given, and what is
// given is missing from the free memory.
func (c *client) holds(way string, alloc func(size uint64) (uint32, error)) error {
	total, before, err := c.usage()
	if err != nil {
		return err
	}
	if _, err := alloc(uint64(total) + uint64(2*quota.MiB)); err == nil {
		return fmt.Errorf("%s: got more than the %v that the GPU shows", way, total)
	}
	const size = 64 * quota.MiB
	h, err := alloc(uint64(size))
	print("%s=%s", way, describe(err))
	_, after, uerr := c.usage()
	if uerr != nil {
		return uerr
	}
	if err != nil {
		if after != before {
			return fmt.Errorf("%s: refused, but free memory went from %v to %v", way, before, after)
		}
		return nil
	}
	if before-min(before, after) < size {
		return fmt.Errorf("%s: got %v uncharged: free memory went from %v to %v", way, size, before, after)
	}
	if err := c.free(h); err != nil {
		return fmt.Errorf("%s: %w", way, err)
	}
	return c.expectFree("end", before, 0)
}

// via is c with another way to make ioctls, for the allocations of holds.
func (c *client) via(call caller) func(size uint64) (uint32, error) {
	return func(size uint64) (uint32, error) {
		// Low memory, so that 32-bit calls can name it.
		mem, err := pages(4096)
		if err != nil {
			return 0, err
		}
		defer syscall.Munmap(mem)
		out, params := mem[:allocSize], mem[1024:1024+128]
		h := c.newHandle()
		c.fillMemoryAlloc(out, params, h, size)
		o := &client{call: call, fd: c.fd}
		if err := o.allocRaw(out, params); err != nil {
			return 0, err
		}
		return h, nil
	}
}

func hostileEnv(c *client, _ hostileOptions) error {
	return c.holds("env", c.via(patient))
}

func hostileForeign(abi string) func(hostileOptions) error {
	return func(hostileOptions) error {
		call := foreignCalls()[abi]
		if call == nil {
			return skip("no such calls on this processor")
		}
		c, err := openGPU(patient)
		if err != nil {
			return err
		}
		defer c.close()
		return c.holds(abi, c.via(call))
	}
}

func hostileType(c *client, _ hostileOptions) error {
	for _, bits := range []uintptr{0, 3<<30 | 'X'<<8, 1<<30 | 0xff<<8, 2 << 30, 'F' << 8} {
		call := func(fd int, cmd uintptr, arg unsafe.Pointer) syscall.Errno {
			return patient(fd, cmd&0x3fff00ff|bits, arg)
		}
		if err := c.holds(fmt.Sprintf("type_%#x", bits), c.via(call)); err != nil {
			return err
		}
	}
	return nil
}

func hostileUpper(c *client, _ hostileOptions) error {
	for _, upper := range []uintptr{1 << 32, 0xdeadbeef << 32} {
		call := func(fd int, cmd uintptr, arg unsafe.Pointer) syscall.Errno { return patient(fd, cmd|upper, arg) }
		if err := c.holds(fmt.Sprintf("cmd_%#x", upper), c.via(call)); err != nil {
			return err
		}
		call = func(fd int, cmd uintptr, arg unsafe.Pointer) syscall.Errno {
			_, _, errno := syscall.Syscall(syscall.SYS_IOCTL, uintptr(fd)|upper, cmd, uintptr(arg))
			return errno
		}
		if err := c.holds(fmt.Sprintf("fd_%#x", upper), c.via(call)); err != nil {
			return err
		}
	}
	return nil
}
