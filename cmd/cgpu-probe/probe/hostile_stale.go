// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// A window on device memory outlives it: when memory is freed RM forgets its mappings and gives the addresses in BAR1 back, but takes no
// page away from whoever has mapped them (osUnmapPciMemoryUser in os.c is empty). So who frees memory and does not munmap sees, and can
// write, what the GPU's memory or BAR1's addresses are given to next.

const (
	staleWindows = 16
	// fewWindows is half of what a small container may have of BAR1: the other process needs some, too.
	fewWindows = 4
	staleSize  = 2 * quota.MiB
	// staleOthers is how many pieces the other process has at most: the driver may give it others than those that were freed first.
	staleOthers = 512

	markOwn   = 0x6e776f2d75706763 // in each page of memory: whose it is
	markOther = 0x7465722d75706763
)

// stale is what a process sees in windows on memory that it has freed.
type stale struct {
	client  *client
	windows [][]byte
	files   []int // in place of windows where nothing can be mapped (simulated driver): who keeps the file could map it
}

// newStale has pieces of memory, maps them, marks them and frees them.
func newStale(pieces int) (s *stale, err error) {
	s = &stale{}
	if s.client, err = openGPU(patient); err != nil {
		return nil, err
	}
	var memory []uint32
	for range pieces {
		h, err := s.add()
		if err != nil {
			return nil, err
		}
		memory = append(memory, h)
	}
	s.mark(markOwn)
	if n := s.count(markOwn); n != s.pages() {
		return nil, fmt.Errorf("%d of %d pages show what was written to them", n, s.pages())
	}
	for _, h := range memory {
		if err := s.client.free(h); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// add has a piece of memory and maps it.
func (s *stale) add() (uint32, error) {
	h, _, err := s.client.memory(staleSize)
	if err != nil {
		return 0, err
	}
	w, fd, _, err := s.client.window(h)
	switch {
	case err != nil:
		return 0, err
	case w == nil:
		s.files = append(s.files, fd)
	default:
		syscall.Close(fd)
		s.windows = append(s.windows, w)
	}
	return h, nil
}

// window maps a piece of memory. The simulated driver has no memory that can be mapped: nil.
func (c *client) window(h uint32) (w []byte, fd int, address uint64, err error) {
	if fd, address, err = c.mapMemory(h, 0, staleSize); err != nil {
		return nil, -1, 0, err
	}
	w, err = syscall.Mmap(fd, 0, int(staleSize), syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
	if err != nil && !errors.Is(err, syscall.ENODEV) {
		return nil, -1, 0, fmt.Errorf("mmap of device memory: %w", err)
	}
	return w, fd, address, nil
}

// briefly maps a piece of memory for as long as f takes.
func (c *client) briefly(h uint32, f func(*stale)) error {
	w, fd, address, err := c.window(h)
	if err != nil {
		return err
	}
	if w != nil {
		f(&stale{windows: [][]byte{w}})
		_ = syscall.Munmap(w)
	}
	syscall.Close(fd)
	b := make([]byte, rm.UnmapMemorySize)
	rm.PutU32(b, rm.UnmapMemoryClient, c.handle)
	rm.PutU32(b, 4, c.device) // NVOS34_PARAMETERS.hDevice
	rm.PutU32(b, rm.UnmapMemoryMemory, h)
	rm.PutU64(b, rm.UnmapMemoryAddress, address)
	rm.PutU32(b, rm.UnmapMemoryStatus, 0xbad)
	errno := c.call.escape(c.fd, rm.EscUnmapMemory, b)
	if st := rm.U32(b, rm.UnmapMemoryStatus); errno != 0 || st != rm.StatusOK {
		return &rmError{what: fmt.Sprintf("RM_UNMAP_MEMORY of %#x", h), errno: errno, status: st}
	}
	return nil
}

func (s *stale) pages() int { return len(s.windows) * int(staleSize/pageBytes) }

const pageBytes = 4 * quota.KiB

// eachPage calls f with the first word of each page.
func (s *stale) eachPage(f func(word []byte)) {
	for _, w := range s.windows {
		for off := quota.Bytes(0); off < staleSize; off += pageBytes {
			f(w[off : off+8])
		}
	}
}

func (s *stale) mark(m uint64) { s.eachPage(func(w []byte) { binary.LittleEndian.PutUint64(w, m) }) }

func (s *stale) count(m uint64) (n int) {
	s.eachPage(func(w []byte) {
		if binary.LittleEndian.Uint64(w) == m {
			n++
		}
	})
	return n
}

// end takes the windows away.
func (s *stale) end() error {
	for _, w := range s.windows {
		if err := syscall.Munmap(w); err != nil {
			return fmt.Errorf("munmap: %w", err)
		}
	}
	for _, fd := range s.files {
		syscall.Close(fd)
	}
	s.windows, s.files = nil, nil
	return nil
}

// other has another process take memory, and counts whose marks the windows show then: pages that show the other's are the hole. The
// other then says in how many of its own it found this one's.
func (s *stale) other() (seen int, err error) {
	kid := exec.Command("/proc/self/exe", "stale-window", "other")
	kid.Stderr = os.Stderr
	in, err := kid.StdinPipe()
	if err != nil {
		return 0, err
	}
	out, err := kid.StdoutPipe()
	if err != nil {
		return 0, err
	}
	if err := kid.Start(); err != nil {
		return 0, err
	}
	pieces, err := readNumber(out)
	if err != nil {
		return 0, fmt.Errorf("the other process: %w", err)
	}
	seen = s.count(markOther)
	print("pages=%d\nown=%d\nzero=%d\nstale=%d\nother_pieces=%d", s.pages(), s.count(markOwn), s.count(0), seen, pieces)
	s.eachPage(func(w []byte) {
		if binary.LittleEndian.Uint64(w) == markOther {
			binary.LittleEndian.PutUint64(w, markOwn)
		}
	})
	in.Close()
	written, err := readNumber(out)
	if err != nil {
		return 0, fmt.Errorf("the other process: %w", err)
	}
	print("written=%d", written)
	return seen, kid.Wait()
}

// readNumber reads a line.
func readNumber(r io.Reader) (int, error) {
	var line []byte
	for b := make([]byte, 1); ; {
		if n, err := r.Read(b); n == 0 {
			return 0, err
		}
		if b[0] == '\n' {
			return strconv.Atoi(strings.TrimSpace(string(line)))
		}
		line = append(line, b[0])
	}
}

// staleOther is the other process: it takes memory, marks it, and at the end of standard input looks for marks that are not its own.
func staleOther() error {
	c, err := openGPU(patient)
	if err != nil {
		return err
	}
	var memory []uint32
	for len(memory) < staleOthers {
		h, _, err := c.memory(staleSize)
		if err != nil { // all that the container may have
			break
		}
		if err := c.briefly(h, func(s *stale) { s.mark(markOther) }); err != nil {
			return err
		}
		memory = append(memory, h)
	}
	if len(memory) == 0 {
		return errors.New("had no memory")
	}
	print("%d", len(memory))
	_, _ = io.Copy(io.Discard, os.Stdin)
	written := 0
	for _, h := range memory {
		if err := c.briefly(h, func(s *stale) { written += s.count(markOwn) }); err != nil {
			return err
		}
	}
	print("%d", written)
	return nil
}

// cmdStaleWindow shows what the driver does on its own; in a container without a guard, or on the host.
func cmdStaleWindow(args []string) error {
	if arg(args, 0) == "other" {
		return staleOther()
	}
	s, err := newStale(staleWindows)
	if err != nil {
		return err
	}
	seen, err := s.other()
	if err == nil && seen > 0 {
		err = fmt.Errorf("%d of %d pages of freed memory show another process' memory", seen, s.pages())
	}
	return err
}

// hostileStaleWindow: memory that is freed and that somebody still sees stays the container's, is charged, and is nobody else's. When the
// window is gone it is back.
func hostileStaleWindow(c *client, _, before quota.Bytes, _ hostileOptions) error {
	s, err := newStale(fewWindows)
	if err != nil {
		return err
	}
	_, free, err := c.usage()
	if err != nil {
		return err
	}
	const held = fewWindows * staleSize
	print("free_before_mib=%d\nfree_kept_mib=%d", before/quota.MiB, free/quota.MiB)
	if before-min(before, free) < held {
		return fmt.Errorf("free memory is %v, of %v before: %v that can still be seen is not counted", free, before, held)
	}
	seen, err := s.other()
	if err != nil {
		return err
	}
	if seen > 0 {
		return fmt.Errorf("%d of %d pages show another process' memory", seen, s.pages())
	}
	if err := s.end(); err != nil {
		return err
	}
	s.client.close()
	for deadline := time.Now().Add(10 * time.Second); ; sleep10ms() {
		if _, free, err = c.usage(); err != nil || free >= before {
			return err
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("free memory is %v: want the %v of before, now that nobody sees it any more", free, before)
		}
	}
}
