// SPDX-License-Identifier: Apache-2.0

package launch

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/guard/guardcfg"
)

// TestStop: a guard that is not needed after all leaves nothing on the node, but for the log of one that has not answered.
func TestStop(t *testing.T) {
	for name, silent := range map[string]bool{"refused": false, "silent": true} {
		dir := t.TempDir()
		c := &guardcfg.Config{Socket: filepath.Join(dir, "a.sock"), Control: filepath.Join(dir, "a.ctl"), Log: filepath.Join(dir, "a.log")}
		g, err := start(func(files []int) (int, error) {
			return spawn("/bin/sh", []string{"sh", "-c", "cat; echo ok >&3; exec sleep 60"}, nil, files)
		})
		if err != nil {
			t.Fatal(err)
		}
		if !silent {
			if err := g.Tell(c); err != nil {
				t.Fatal(err)
			}
			if err := g.Wait(time.Minute); err != nil {
				t.Fatal(err)
			}
		} else {
			g.config = c // it is not told, and so says nothing
			if err := g.Wait(time.Millisecond); err == nil || !strings.Contains(err.Error(), "see "+c.Log) {
				t.Errorf("%s: %v", name, err)
			}
		}
		for _, path := range []string{c.Socket, c.Control, c.Log} {
			if err := os.WriteFile(path, nil, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		g.Stop()
		if err := unix.Kill(g.PID, 0); err == nil {
			t.Errorf("%s: process %d lives", name, g.PID)
		}
		left, _ := filepath.Glob(filepath.Join(dir, "*"))
		if silent != (len(left) == 1 && left[0] == c.Log) || !silent && len(left) > 0 {
			t.Errorf("%s: left %v", name, left)
		}
	}
}

// TestStopHanging: a guard that hangs in the driver cannot be killed; who refuses the container does not wait for that. Here a tracer
// keeps a child in its exit.
func TestStopHanging(t *testing.T) {
	g, err := start(func(files []int) (int, error) { return spawn("/bin/sleep", []string{"sleep", "600"}, nil, files) })
	if err != nil {
		t.Fatal(err)
	}
	tracer := exec.Command("/proc/self/exe")
	tracer.Env = append(os.Environ(), tracedVariable+"="+strconv.Itoa(g.PID))
	said, err := tracer.StdoutPipe()
	if err == nil {
		err = tracer.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	if line, _ := bufio.NewReader(said).ReadString('\n'); line != "ok\n" {
		t.Fatalf("the tracer said %q", line)
	}
	done := make(chan struct{})
	go func() { g.Stop(); close(done) }()
	select {
	case <-done:
	case <-time.After(time.Minute):
		t.Error("waits for a guard that does not end")
	}
	if err := unix.Kill(g.PID, 0); err != nil {
		t.Errorf("the guard has ended, so this shows nothing: %v", err)
	}
	_ = tracer.Process.Kill()
	_ = tracer.Wait()
	<-done
}

// tracedVariable has this program keep the process that it names from ending.
const tracedVariable = "CGPU_TEST_TRACED"

func TestMain(m *testing.M) {
	pid, err := strconv.Atoi(os.Getenv(tracedVariable))
	if err != nil {
		os.Exit(m.Run())
	}
	runtime.LockOSThread()
	if _, _, e := unix.RawSyscall6(unix.SYS_PTRACE, unix.PTRACE_SEIZE, uintptr(pid), 0, unix.PTRACE_O_TRACEEXIT, 0, 0); e != 0 {
		fmt.Println(e)
		os.Exit(1)
	}
	fmt.Println("ok")
	time.Sleep(time.Hour) // until it is killed
}
