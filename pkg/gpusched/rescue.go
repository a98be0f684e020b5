// SPDX-License-Identifier: Apache-2.0

package gpusched

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/guard/guardcfg"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// A guard that is killed while its container's channels are off would leave them off for ever. So it never pauses anything
// before there is a second process, cgpu-rescue, that waits for the end of a pipe from it and then lets run what was off. What
// is off stands in a file that both map, written before the driver is asked to pause; should both be killed, `cgpu resume`
// reads the file.
type rescue struct {
	path    string
	mem     []byte
	entries int // for each GPU
	pipe    *os.File
	process *os.Process
	gone    atomic.Bool
}

// The file: the length of a Config, the Config as JSON, and from rescueHeader on for each GPU a count and so many times a
// client, a channel, and the process that made the client.
const (
	rescueHeader = 16 << 10
	rescueEntry  = 12
)

// LeftoversSuffix ends the name of such a file.
const LeftoversSuffix = ".pause"

// LeftoversFile is where a guard notes what it has paused, by its socket (ledger.Record).
func LeftoversFile(socket string) string {
	return strings.TrimSuffix(socket, ".sock") + LeftoversSuffix
}

// insure makes sure that the rescuer lives.
func (s *Scheduler) insure() error {
	if s.closed {
		return errors.New("the container is over")
	}
	if s.rescue != nil && !s.rescue.gone.Load() {
		return nil
	}
	var err error
	r := s.rescue
	if r == nil {
		if r, err = newRescue(s.Config); err != nil {
			return err
		}
	} else if r.pipe != nil { // of a rescuer that was killed. Its file says what is off now, perhaps on another GPU.
		_ = r.pipe.Close()
		r.pipe = nil
	}
	r.gone.Store(false)
	if r.process, r.pipe, err = s.StartRescuer(r.path, &r.gone); err != nil {
		r.gone.Store(true)
		if s.rescue == nil {
			r.close()
		}
		return err
	}
	s.rescue = r
	return nil
}

// note writes down what is about to be off on a GPU. What does not go on is nothing to resume.
func (s *Scheduler) note(gpu int, channels []Channel) {
	if !s.rescue.note(gpu, s.Container.GoOn(channels)) {
		s.LogOnce("rescuefull", "more channels than max_channels", "channels", len(channels))
	}
}

// keepNotes drops what is noted of a GPU and does not go on.
func (s *Scheduler) keepNotes(gpu int) {
	if s.rescue != nil {
		s.rescue.keep(gpu, s.mayRun(s.Container.Channels(gpu, true)))
	}
}

func newRescue(cfg guardcfg.Config) (*rescue, error) {
	r := &rescue{path: LeftoversFile(cfg.Socket), entries: max(cfg.Settings.MaxChannels, 64)}
	said, err := json.Marshal(cfg)
	if err != nil || len(said) > rescueHeader-8 {
		return nil, fmt.Errorf("the configuration of %d bytes does not fit: %v", len(said), err)
	}
	f, err := os.OpenFile(r.path, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("make %s: %w", r.path, err)
	}
	defer f.Close()
	size := rescueHeader + len(cfg.GPUs)*r.section()
	// Not a hole: to write there where the file system is full would kill the guard.
	if err := unix.Fallocate(int(f.Fd()), 0, 0, int64(size)); err != nil {
		return nil, fmt.Errorf("make %s: %w", r.path, err)
	}
	if r.mem, err = unix.Mmap(int(f.Fd()), 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		return nil, fmt.Errorf("map %s: %w", r.path, err)
	}
	rm.PutU32(r.mem, 0, uint32(len(said)))
	rm.PutU32(r.mem, 4, uint32(r.entries))
	copy(r.mem[8:], said)
	return r, nil
}

func (r *rescue) section() int { return 8 + rescueEntry*r.entries }

// entry is where one of a GPU's is.
func (r *rescue) entry(gpu, i int) int { return rescueHeader + gpu*r.section() + 8 + rescueEntry*i }

func (r *rescue) count(gpu int) *atomic.Uint32 {
	return (*atomic.Uint32)(unsafe.Pointer(&r.mem[rescueHeader+gpu*r.section()]))
}

// note writes down channels beside what is off already: the list is valid all the time. False: there is no room for all.
func (r *rescue) note(gpu int, channels []Channel) bool {
	n := int(r.count(gpu).Load())
	noted := map[uint64]bool{}
	for i := range n {
		noted[rm.U64(r.mem, r.entry(gpu, i))] = true
	}
	full := false
	for _, ch := range channels {
		if noted[ch.name()] {
			continue
		}
		if full = n == r.entries; full {
			break
		}
		at := r.entry(gpu, n)
		rm.PutU32(r.mem, at, ch.Client)
		rm.PutU32(r.mem, at+4, ch.Handle)
		rm.PutU32(r.mem, at+8, uint32(ch.PID))
		n++
	}
	r.count(gpu).Store(uint32(n))
	return !full
}

// name is how an entry of the file begins.
func (ch Channel) name() uint64 { return uint64(ch.Handle)<<32 | uint64(ch.Client) }

// keep drops what is noted of a GPU and runs again: all but some channels. Each of those is in the list all the time.
func (r *rescue) keep(gpu int, channels []Channel) {
	left := map[uint64]bool{}
	for _, ch := range channels {
		left[ch.name()] = true
	}
	n := 0
	for i := range int(r.count(gpu).Load()) {
		if at := r.entry(gpu, i); left[rm.U64(r.mem, at)] {
			copy(r.mem[r.entry(gpu, n):], r.mem[at:at+rescueEntry])
			n++
		}
	}
	r.count(gpu).Store(uint32(n))
}

func (r *rescue) forget(gpu int) {
	if r != nil {
		r.count(gpu).Store(0)
	}
}

// close ends the rescuer, when nothing is off any more.
func (r *rescue) close() {
	if r.pipe != nil {
		_ = r.pipe.Close()
	}
	if r.mem != nil {
		_ = unix.Munmap(r.mem)
	}
	_ = os.Remove(r.path)
}

// rescuerStarts is how long it may take until a rescuer has opened the driver; nothing is paused before. It is long because of containers
// that leave their guard little of the processors (docs/slurm.md).
const rescuerStarts = time.Minute

// startRescuer runs this program as cgpu-rescue. The name differs, so that `pkill cgpu-guard` does not end both.
func startRescuer(path string, gone *atomic.Bool) (*os.Process, *os.File, error) {
	return startRescuerWithin(rescuerStarts, path, gone)
}

func startRescuerWithin(patience time.Duration, path string, gone *atomic.Bool) (*os.Process, *os.File, error) {
	read, write, err := os.Pipe()
	if err != nil {
		return nil, nil, fmt.Errorf("pipe: %w", err)
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Args = []string{RescueName, path}
	cmd.Stdin = read
	cmd.Dir = "/"
	ready, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	_ = read.Close()
	if err != nil {
		_ = write.Close()
		return nil, nil, fmt.Errorf("start %s: %w", RescueName, err)
	}
	if f, ok := ready.(*os.File); ok { // the Scheduler is locked, and a program's call waits
		_ = f.SetReadDeadline(time.Now().Add(patience))
	}
	line, _ := bufio.NewReader(io.LimitReader(ready, 4096)).ReadString('\n')
	if strings.TrimSpace(line) != "ok" {
		_ = cmd.Process.Kill() // before its pipe ends: one that is ready by now would take that for this program's end
		_ = write.Close()
		go func() { _ = cmd.Wait() }() // what hangs in the driver does not die
		return nil, nil, fmt.Errorf("%s does not say that it is ready: %q", RescueName, strings.TrimSpace(line))
	}
	go func() {
		_ = cmd.Wait()
		gone.Store(true)
	}()
	return cmd.Process, write, nil
}
