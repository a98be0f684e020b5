// SPDX-License-Identifier: Apache-2.0

package gpusched

import (
	"errors"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/rm"
)

// TestUserPagesLook reads made-up pages.
func TestUserPagesLook(t *testing.T) {
	f := newFakeContainer(t, 1)
	p := newUserPages(f.gpu())
	p.next = time.Hour * 24 * 365 * 100
	page := make([]byte, 4096)
	one := &userPage{UserPage: &UserPage{Words: page}}
	two := &userPage{UserPage: &UserPage{Words: page[0x200:]}} // several channels share a page of a program's
	p.pages[1], p.pages[2] = one, two
	for _, c := range []struct {
		name     string
		v        *userPage
		get, put uint32
		worked   bool
	}{
		{"nothing yet", one, 0, 0, false},
		{"work is put in", one, 0, 3, true},
		{"it is still there", one, 0, 3, true},
		{"the GPU has got some", one, 2, 3, true},
		{"the GPU has got all", one, 3, 3, false}, // which is no news: it presses for a while anyway
		{"nothing new", one, 3, 3, false},
		{"work came and went between two looks", one, 9, 9, true},
		{"nothing new", one, 9, 9, false},
		{"in the other channel", two, 0, 1, true},
		{"done there", two, 1, 1, false},
		{"the queue begins anew", one, 9, 0, true},
		{"and is empty", one, 0, 0, false},
		{"nothing new", one, 0, 0, false},
	} {
		rm.PutU32(c.v.Words, userdGPGet, c.get)
		rm.PutU32(c.v.Words, userdGPPut, c.put)
		if worked := p.hadWork(); worked != c.worked {
			t.Errorf("%s: worked %v", c.name, worked)
		}
	}
}

// TestUserPages: pages of new channels are opened once, those of channels that are gone are closed.
func TestUserPages(t *testing.T) {
	c := newFakeContainer(t, 1)
	names := c.channels(fakeClient, workGroup, 0x100, 3)
	open := map[any]int{}
	c.pages = func(ch Channel) (*UserPage, error) {
		switch ch.Object {
		case names[0]:
			return nil, nil
		case names[1]:
			return nil, errors.New("not this one")
		}
		open[ch.Object]++
		return &UserPage{Words: make([]byte, UserWords), Close: func() { open[ch.Object]-- }}, nil
	}
	p := newUserPages(c.gpu())
	for range 2 {
		if seen := p.Sync(); seen != 1 || open[names[2]] != 1 {
			t.Errorf("%d seen, %v are open", seen, open)
		}
	}
	c.freeChannel(names[2])
	if seen := p.Sync(); seen != 0 || open[names[2]] != 0 {
		t.Errorf("%d seen, %v are open", seen, open)
	}
	names[2] = c.channels(fakeClient, workGroup, 0x200, 1)[0]
	p.Sync()
	if p.Release(); open[names[2]] != 0 || len(p.pages) > 0 {
		t.Errorf("%v are open", open)
	}
}
