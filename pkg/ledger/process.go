// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"syscall"
)

// liveness is what is known of a process.
type liveness int

const (
	alive   liveness = iota
	dead             // gone, or its number belongs to another process now
	unknown          // could not be looked at; to be treated as alive
)

// ProcStart returns the start time of a process in clock ticks after boot (field 22 of /proc/PID/stat), which together
// with the number identifies it. A process that is gone gives an error that is fs.ErrNotExist.
func ProcStart(pid int) (uint64, error) {
	s, err := readStat(pid)
	return s.start, err
}

// processStatus tells whether the process that had pid and start is alive. start 0 (not recorded) matches any.
func processStatus(pid int, start uint64) liveness {
	s, err := readStat(pid)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return dead
	case err != nil:
		return unknown
	case start != 0 && s.start != start:
		return dead
	case s.state == 'X', s.state == 'Z' && s.threads <= 1:
		// A zombie holds nothing. But a first thread that ended before the others shows as a zombie too.
		return dead
	}
	return alive
}

// GuardLives tells whether the record's guard still runs; doubt counts as running.
func (r Record) GuardLives() bool {
	return r.GuardPID != 0 && processStatus(r.GuardPID, r.GuardStart) != dead
}

// ContainerLives tells whether the container's first process still runs; doubt counts as running.
func (r Record) ContainerLives() bool {
	return r.InitPID != 0 && processStatus(r.InitPID, r.InitStart) != dead
}

// stat is what we need of /proc/PID/stat.
type stat struct {
	state   byte
	threads int
	start   uint64
}

func readStat(pid int) (stat, error) {
	if pid <= 0 {
		return stat{}, fmt.Errorf("ledger: process %d: %w", pid, fs.ErrNotExist)
	}
	data, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if errors.Is(err, syscall.ESRCH) {
		// The process ended between open and read.
		err = fs.ErrNotExist
	}
	if err != nil {
		return stat{}, fmt.Errorf("ledger: process %d: %w", pid, err)
	}
	s, ok := parseStat(data)
	if !ok {
		return stat{}, fmt.Errorf("ledger: process %d: unexpected /proc/%d/stat", pid, pid)
	}
	return s, nil
}

// parseStat reads a line of /proc/PID/stat. The second field is the command in parentheses, which the process chooses
// itself and which may hold spaces and parentheses: the fields are counted from the last one.
func parseStat(data []byte) (stat, bool) {
	end := bytes.LastIndexByte(data, ')')
	if end < 0 {
		return stat{}, false
	}
	fields := bytes.Fields(data[end+1:]) // fields[0] is field 3, the state
	if len(fields) < 20 || len(fields[0]) != 1 {
		return stat{}, false
	}
	threads, err1 := strconv.Atoi(string(fields[20-3]))
	start, err2 := strconv.ParseUint(string(fields[22-3]), 10, 64)
	return stat{fields[0][0], threads, start}, err1 == nil && err2 == nil
}
