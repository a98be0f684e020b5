// SPDX-License-Identifier: Apache-2.0

package nvmlclient

import (
	"errors"
	"io"
	"testing"
	"time"
)

// TestHardware: one child is asked again and again; one that has ended, or could not be started, is not replaced for a minute.
func TestHardware(t *testing.T) {
	now, starts, ended := time.Unix(0, 0), 0, 0
	var answers chan []byte
	fails := false
	h := &Client{rest: Rest, now: func() time.Time { return now }, start: func() (*child, error) {
		starts++
		if fails {
			return nil, errors.New("no")
		}
		answers = make(chan []byte, 1)
		read, write := io.Pipe()
		go func() { _, _ = io.Copy(io.Discard, read) }()
		return &child{in: write, answers: answers, end: func() { ended++ }}, nil
	}}
	ask := func(line string) bool {
		if h.child == nil && line != "" { // the child is there before its answer
			h.child, _ = h.start()
		}
		if line != "" {
			answers <- []byte(line)
		}
		all, err := h.Ask()
		return err == nil && *all["GPU-a"].Temperature == 41
	}
	const good = `{"GPU-a":{"temperature":41}}`
	for range 2 {
		if !ask(good) || starts != 1 {
			t.Fatalf("%d children", starts)
		}
	}
	close(answers)
	if ask("") || ended != 1 || ask("") || starts != 1 {
		t.Errorf("after the child's end: %d ended, %d started", ended, starts)
	}
	fails = true
	for range 3 {
		now = now.Add(Rest)
		for range 2 {
			if ask("") {
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
	var answers chan []byte
	h := &Client{rest: Rest, now: func() time.Time { return now }, start: func() (*child, error) {
		starts++
		answers = make(chan []byte, 1)
		read, write := io.Pipe()
		go func() { _, _ = io.Copy(io.Discard, read) }()
		return &child{in: write, answers: answers, end: func() { ended++ }}, nil
	}}
	for range 3 {
		if _, err := h.Ask(); err == nil {
			t.Fatal("an answer of nobody")
		}
	}
	answers <- []byte(`{}`) // late
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
