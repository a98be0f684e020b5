// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"context"
	"net"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// startServer serves a driver on a socket of the test.
func startServer(t *testing.T) (*Driver, string) {
	t.Helper()
	d := newDriver(t)
	return d, serve(t, d)
}

// serve serves d until the test ends.
func serve(t *testing.T, d *Driver) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "sim.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- d.Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("serve: %v", err)
		}
		if s := d.Snapshot(); s.Clients != 0 || s.Files != 0 || s.Objects != 0 {
			t.Errorf("left over after the server's end: %+v", s)
		}
	})
	return path
}

func dial(t *testing.T, path string, minors ...int) *Conn {
	t.Helper()
	c, err := Dial(path, minors)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		if f() {
			return
		}
	}
	t.Fatalf("%s: not within a minute", what)
}

func TestServer(t *testing.T) {
	d, path := startServer(t)
	c := dial(t, path, 0)
	u := newGPUUser(t, c, 100)
	h, granted, st := u.memory(1<<20 + 1)
	if st != 0 || granted != quota.MiB+64*quota.KiB {
		t.Fatalf("alloc over the socket: status %#x, %v", st, granted)
	}
	if s, err := c.Snapshot(); err != nil || s.GPUs[0].Used != granted || s.GPUs[0].Processes[0].PID != 100 {
		t.Errorf("snapshot %+v, %v", s, err)
	}
	if st := u.export(3, h); st != 0 {
		t.Errorf("export: %#x", st)
	}
	if st := u.free(h); st != 0 {
		t.Errorf("free: %#x", st)
	}
	if err := c.CloseExport(3); err != nil {
		t.Error(err)
	}
	wantUsed(t, d, 0)
	if _, err := c.OpenFile(GPUNode, 3); err == nil {
		t.Error("opened a node that the connection does not have")
	}
	if err := c.CloseFile(9999); err == nil {
		t.Error("closed a file that is not there")
	}
	if e := c.Ioctl(u.file, 1, 1, &rm.Call{Cmd: cmd(rm.EscFree, 99), Outer: make([]byte, 99)}); e != syscall.EINVAL {
		t.Errorf("wrong size over the socket: %v", e)
	}
}

func TestDeathOfAConnection(t *testing.T) {
	d, path := startServer(t)
	dead, alive := dial(t, path, 0), dial(t, path, 0)
	u, v := newGPUUser(t, dead, 1), newGPUUser(t, alive, 2)
	u.memory(1 << 30)
	h, _, _ := u.memory(1 << 20)
	u.export(1, h)
	_, keep, _ := v.memory(2 << 20)
	dead.Close()
	eventually(t, "memory of the dead", func() bool { return d.Snapshot().GPUs[0].Used == keep })
	if e := dead.Ioctl(u.file, 1, 1, &rm.Call{Cmd: cmd(rm.EscFree, 16), Outer: make([]byte, 16)}); e != syscall.EIO {
		t.Errorf("call on a closed connection: %v, want EIO", e)
	}
	if _, _, st := v.memory(2 << 20); st != 0 {
		t.Errorf("the other connection: %#x", st)
	}
}

func TestSlowCallBlocksNobody(t *testing.T) {
	_, path := startServer(t)
	c := dial(t, path, 0)
	u := newGPUUser(t, c, 1)
	if err := c.SetDelay(Delay{Alloc: 300 * time.Millisecond}); err != nil {
		t.Fatal(err)
	}
	beside := false
	for i := uint32(0); i < 10 && !beside; i++ { // on a busy machine something else may have kept the quick ones
		start, over := time.Now(), make(chan struct{})
		slow := *u
		go func() {
			defer close(over)
			p := make([]byte, 128)
			rm.PutU32(p, rm.MemoryOwner, 1)
			rm.PutU64(p, rm.MemorySize, 1<<20)
			if _, st := slow.alloc(slow.dev, 0x7000+i, classMemoryLocal, p); st != 0 {
				t.Errorf("slow call: %#x", st)
			}
		}()
		time.Sleep(20 * time.Millisecond)
		for range 10 {
			if st := u.control(u.subd, 0x20801303, make([]byte, 1028)); st != 0 {
				t.Errorf("%#x", st)
			}
		}
		select {
		case <-over:
		default:
			beside = true
		}
		<-over
		if d := time.Since(start); d < 300*time.Millisecond {
			t.Errorf("the slow call took only %v", d)
		}
	}
	if !beside {
		t.Error("quick calls are done after the slow one")
	}
	// A connection that dies during a slow call leaves nothing.
	_ = c.SetDelay(Delay{Alloc: time.Hour})
	go func() {
		p := make([]byte, 128)
		rm.PutU32(p, rm.MemoryOwner, 1)
		rm.PutU64(p, rm.MemorySize, 1<<20)
		call := &rm.Call{Cmd: cmd(rm.EscAlloc, 48), Outer: make([]byte, 48), Blocks: []rm.Block{{In: -1, Off: 16, Data: p}}}
		rm.PutU32(call.Outer, rm.AllocClass, classMemoryLocal)
		c.Ioctl(u.file, 1, 1, call)
	}()
	time.Sleep(20 * time.Millisecond)
	c.Close()
}

func TestManyGoroutinesOneConn(t *testing.T) {
	d, path := startServer(t)
	c := dial(t, path, 0)
	var wg sync.WaitGroup
	for pid := range int32(8) {
		u := newGPUUser(t, c, pid+1)
		wg.Go(func() {
			for range 100 {
				h, _, st := u.memory(2 << 20)
				if st != 0 || u.free(h) != 0 {
					t.Errorf("status %#x", st)
					return
				}
			}
		})
	}
	wg.Wait()
	wantUsed(t, d, 0)
}

func TestServerDropsGarbage(t *testing.T) {
	d, path := startServer(t)
	for _, frame := range [][]byte{
		{0xff, 0xff, 0xff, 0xff},                       // too long
		{1, 0, 0, 0, 9},                                // no hello
		appendBytes(nil, make([]byte, 17)),             // version 0
		{13, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1, 0}, // cut off
	} {
		c, err := net.Dial("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = c.Write(frame)
		if u, ok := c.(*net.UnixConn); ok {
			_ = u.CloseWrite()
		}
		_ = c.SetReadDeadline(time.Now().Add(time.Minute))
		b := make([]byte, 64)
		for err = nil; err == nil; {
			_, err = c.Read(b)
		}
		c.Close()
	}
	if s := d.Snapshot(); s.Files != 0 {
		t.Errorf("%+v", s)
	}
}

func FuzzServe(f *testing.F) {
	call := &rm.Call{Cmd: cmd(rm.EscAlloc, 48), Outer: make([]byte, 48), Blocks: []rm.Block{{In: -1, Off: 16, Data: make([]byte, 128)}}}
	f.Add(uint8(opIoctl), appendCall([]byte{1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0}, call))
	f.Add(uint8(opOpen), []byte{0, 0, 0, 0, 0})
	f.Add(uint8(opSwitches), []byte{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0})
	f.Add(uint8(opPending), []byte{0, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0})
	f.Add(uint8(opDelay), []byte(`{"alloc":1}`))
	f.Fuzz(func(t *testing.T, op uint8, body []byte) {
		if op == opDelay {
			return // would really wait
		}
		d, err := New(testConfig())
		if err != nil {
			t.Fatal(err)
		}
		s := d.Session([]int{0})
		file, _ := s.OpenFile(Control, 0)
		u := &user{t: t, s: s, file: file, pid: 1}
		u.client, _ = u.alloc(0, 0, classRootClient, nil)
		u.dev, _ = u.alloc(u.client, 0x80, classDevice, make([]byte, 56))
		u.subd, _ = u.alloc(u.dev, 0x2080, classSubdevice, make([]byte, 4))
		d.serve(s, op, &decoder{b: body})
		s.Close()
		if s := d.Snapshot(); s.Objects != 0 || s.GPUs[0].Used != 0 || s.GPUs[1].Used != 0 || s.Exports != 0 {
			t.Fatalf("left over: %+v", s)
		}
	})
}
