// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"os"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/proc"
)

// uvmSpans lists the mappings of managed memory of a process: shared, and with their own address as the offset in the file, as
// UVM requires of its mappings (uvm_mmap) and nothing else does by chance. Neither name nor inode of the file would do: a
// container can make other nodes of the device. False: the process goes on, but its threads end, and leave the work to new ones, before
// its maps can be read, which the kernel shows by a living thread's number only; or its maps have no end.
func uvmSpans(tgid int) ([]span, bool) {
	list, err := spansOf(tgid)
	if err == nil || errors.Is(err, errEndless) {
		return list, err == nil
	}
	known := map[int]bool{}
	for fresh, old := 0, 0; fresh < livingTries; {
		before := len(known)
		for tid := range proc.Threads(tgid) {
			known[tid] = true
			if list, err := spansOf(tid); err == nil || errors.Is(err, errEndless) {
				return list, err == nil
			}
		}
		if len(known) > before {
			fresh++
		} else if old++; old > 3 { // none is new, and the kernel does not skip them each time: they only end
			return nil, true
		}
	}
	return nil, false
}

// spansOf is uvmSpans by the number of a thread. It fails where that has ended, or is about to.
func spansOf(tid int) ([]span, error) {
	f, err := os.Open("/proc/" + strconv.Itoa(tid) + "/maps")
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return parseMaps(f)
}

// maxMapLines bounds what is read of a process' maps: the kernel goes on from the address where it was, so who maps and unmaps ahead
// of the reader could keep him for as long as there are addresses. At once a process has as many mappings as vm.max_map_count says: 65530,
// and 1048576 on some systems.
const maxMapLines = 2 << 20

var errEndless = errors.New("more mappings than a process can have")

// parseMaps fails where there are no maps at all, as of a thread that is about to end.
func parseMaps(f io.Reader) ([]span, error) {
	var list []span
	var more uint64 // of ranges that are not in the list
	some := false
	lines := bufio.NewReaderSize(f, 64<<10)
	for range maxMapLines {
		// The beginning of a line is enough. Its end is a path, which a container can make longer than any buffer: folders nest
		// without a bound, and what they are named does not count here.
		line, err := lines.ReadSlice('\n')
		some = some || len(line) > 0
		if base, end, ok := parseUVMMap(line); ok && len(list) < maxSpans {
			list = append(list, span{base: base, end: end})
		} else if ok { // an administrator may have raised vm.max_map_count
			more += end - base
		}
		for errors.Is(err, bufio.ErrBufferFull) {
			_, err = lines.ReadSlice('\n')
		}
		if err == nil {
			continue
		}
		if more > 0 {
			list = oneSpan(list)
			list[0].end += more
		}
		if errors.Is(err, io.EOF) && some {
			err = nil
		}
		return list, err
	}
	return nil, errEndless
}

// parseUVMMap reads a line of /proc/PID/maps: "7fa2e6000000-7fa2f6000000 rw-s 7fa2e6000000 00:06 144 /dev/nvidia-uvm".
func parseUVMMap(line []byte) (base, end uint64, ok bool) {
	i := bytes.IndexByte(line, '-')
	if i <= 0 {
		return 0, 0, false
	}
	first := line[:i]
	rest := line[i+1:]
	j := bytes.IndexByte(rest, ' ')
	if j < 0 || len(rest) < j+6 || rest[j+4] != 's' {
		return 0, 0, false
	}
	offset := rest[j+6:]
	if k := bytes.IndexByte(offset, ' '); k >= 0 {
		offset = offset[:k]
	}
	// The kernel pads both with zeros to eight digits.
	if !bytes.Equal(first, offset) {
		return 0, 0, false
	}
	base, err := strconv.ParseUint(string(first), 16, 64)
	if err != nil || base == 0 {
		return 0, 0, false
	}
	end, err = strconv.ParseUint(string(rest[:j]), 16, 64)
	return base, end, err == nil && end > base
}

// sharesMaps tells which of other processes has the address space of a process (vfork, CLONE_VM); 0: none, and then it is added to
// them. They are kept in the kernel's order of address spaces, in which a search needs few comparisons.
func sharesMaps(tgid int, spaces *[]int) int {
	list := *spaces
	from, to := 0, len(list)
	for from < to {
		i := (from + to) / 2
		switch order, e := compareVM(list[i], tgid); {
		case e == 0 && order == 0 && sameSpace(list[i], tgid):
			return list[i]
		case e == 0 && order <= 1: // less; or both have none, as their first threads have ended
			from = i + 1
		case e == 0:
			to = i
		default:
			if _, e := compareVM(tgid, tgid); e != 0 {
				return 0 // gone
			}
			list = slices.Delete(list, i, i+1) // that one is gone, and would lead astray
			*spaces = list
			from, to = 0, len(list)
		}
	}
	*spaces = slices.Insert(list, from, tgid)
	return 0
}

// sameSpace says whether two processes that compare as equal have the same address space.
func sameSpace(a, b int) bool {
	order, e := compareVM(livingThread(a), livingThread(b))
	return e == 0 && order == 0
}

func compareVM(a, b int) (order int, e unix.Errno) {
	r, _, e := unix.RawSyscall6(unix.SYS_KCMP, uintptr(a), uintptr(b), kcmpVM, 0, 0, 0)
	return int(r), e
}

const kcmpVM = 1 // KCMP_VM
