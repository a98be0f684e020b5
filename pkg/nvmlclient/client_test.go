// SPDX-License-Identifier: Apache-2.0

package nvmlclient

import (
	"bufio"
	"errors"
	"io"
	"maps"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/quota"
)

// TestXidsComeByThemselves: an Xid is told once, also where the child gives no answer, and where it has ended since.
func TestXidsComeByThemselves(t *testing.T) {
	answers := make(chan map[string]device.Hardware, 1)
	h := New(device.HealthLine, Rest)
	h.now, h.start = func() time.Time { return time.Unix(0, 0) }, func(heard func(map[string]device.Hardware)) (*child, error) {
		readHardware(strings.NewReader(`{"GPU-a":{"newXids":[79]}}
{"GPU-a":{"newXids":[79]}}
{"GPU-b":{"temperature":41},"GPU-c":{"xids":0}}
{"GPU-a":{"newXids":[48]}}
none of ours
{"GPU-a":{"newXids":[1]}}
`), heard, answers)
		read, write := io.Pipe()
		go func() { _, _ = io.Copy(io.Discard, read) }()
		return &child{in: write, answers: answers, end: func() {}}, nil
	}
	got, err := h.Ask()
	n := func(n uint64) *uint64 { return &n }
	if want := map[string]device.Hardware{"GPU-a": {Xids: n(3), NewXids: []uint64{79, 48}, Lost: true}, "GPU-b": {Temperature: new(41.0)},
		"GPU-c": {Xids: n(0)}}; err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%v: %+v, want %+v", err, got, want)
	}
	h.hear(map[string]device.Hardware{"GPU-a": {NewXids: []uint64{62}}})
	close(answers)
	for _, want := range [][]uint64{{62}, nil} { // the count is of all children
		if got, err = h.Ask(); err == nil || !reflect.DeepEqual(got["GPU-a"].NewXids, want) || *got["GPU-a"].Xids != 4 ||
			*got["GPU-c"].Xids != 0 {
			t.Errorf("of one that has ended: %v, %+v", err, got)
		}
	}
}

// TestHardware: one child is asked again and again; one that has ended, or could not be started, is not replaced for a minute.
func TestHardware(t *testing.T) {
	now, starts, ended := time.Unix(0, 0), 0, 0
	var answers chan map[string]device.Hardware
	fails := false
	h := New(device.HardwareLine, Rest)
	h.now, h.start = func() time.Time { return now }, func(func(map[string]device.Hardware)) (*child, error) {
		starts++
		if fails {
			return nil, errors.New("no")
		}
		answers = make(chan map[string]device.Hardware, 1)
		read, write := io.Pipe()
		go func() { _, _ = io.Copy(io.Discard, read) }()
		return &child{in: write, answers: answers, end: func() { ended++ }}, nil
	}
	ask := func(answer map[string]device.Hardware) bool {
		if h.child == nil && answer != nil { // the child is there before its answer
			h.child, _ = h.start(nil)
			h.next = now.Add(h.rest)
		}
		if answer != nil {
			answers <- answer
		}
		all, err := h.Ask()
		return err == nil && *all["GPU-a"].Temperature == 41
	}
	good := map[string]device.Hardware{"GPU-a": {Temperature: new(41.0)}}
	for range 2 {
		if !ask(good) || starts != 1 {
			t.Fatalf("%d children", starts)
		}
	}
	close(answers)
	if ask(nil) || ended != 1 || ask(nil) || starts != 1 {
		t.Errorf("after the child's end: %d ended, %d started", ended, starts)
	}
	fails = true
	for range 3 {
		now = now.Add(Rest)
		for range 2 {
			if ask(nil) {
				t.Error("an answer of nobody")
			}
		}
	}
	if starts != 4 {
		t.Errorf("%d started", starts)
	}
	fails = false
	if !ask(good) {
		t.Error("no answer of a new one")
	}
	h.Close()
	if ended != 2 {
		t.Error("the child stays")
	}
}

// TestHardwareHangs: who does not answer keeps nobody waiting twice, is killed after a minute, and has no other beside him until
// he has ended.
func TestHardwareHangs(t *testing.T) {
	now, starts, ended := time.Unix(0, 0), 0, 0
	var answers chan map[string]device.Hardware
	h := New(device.HardwareLine, Rest)
	h.now, h.start = func() time.Time { return now }, func(func(map[string]device.Hardware)) (*child, error) {
		starts++
		answers = make(chan map[string]device.Hardware, 1)
		read, write := io.Pipe()
		go func() { _, _ = io.Copy(io.Discard, read) }()
		return &child{in: write, answers: answers, end: func() { ended++ }}, nil
	}
	for range 3 {
		if _, err := h.Ask(); err == nil {
			t.Fatal("an answer of nobody")
		}
	}
	answers <- map[string]device.Hardware{} // late
	if _, err := h.Ask(); err != nil || starts != 1 || ended != 0 {
		t.Fatalf("%v, %d started, %d ended", err, starts, ended)
	}
	if _, err := h.Ask(); err == nil {
		t.Fatal("an answer of nobody")
	}
	for range 3 {
		now = now.Add(Rest)
		if _, err := h.Ask(); err == nil || starts != 1 || ended == 0 {
			t.Errorf("%v, %d started, %d ended", err, starts, ended)
		}
	}
	close(answers)
	_, _ = h.Ask()
	now = now.Add(Rest)
	if _, _ = h.Ask(); starts != 2 {
		t.Errorf("%d started", starts)
	}
}

// TestLimited: a line of the form that cgpu-refresh reads, whatever a cgroup is called, and what of the answer is used.
func TestLimited(t *testing.T) {
	const name = "GPU-a=/a b\n\"c\""
	h, read := New(device.MemoryLine, Rest), make(chan string, 1)
	h.start = func(func(map[string]device.Hardware)) (*child, error) {
		from, to := io.Pipe()
		go func() {
			line, _ := bufio.NewReader(from).ReadString('\n')
			read <- line
		}()
		answers := make(chan map[string]device.Hardware, 1)
		answers <- map[string]device.Hardware{name: {Used: new(quota.Bytes(7))}, "GPU-b=/x": {}}
		return &child{in: to, answers: answers, end: func() {}}, nil
	}
	got, err := h.Limited([]string{name})
	if want := map[string]quota.Bytes{name: 7}; err != nil || !maps.Equal(got, want) {
		t.Errorf("%v, %v, want %v", got, err, want)
	}
	if line := <-read; line != device.LimitsLine+` ["GPU-a=/a b\n\"c\""]`+"\n" {
		t.Errorf("asked with %q", line)
	}
}
