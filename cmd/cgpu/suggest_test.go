// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io/fs"
	"syscall"
	"testing"
)

func TestComplaint(t *testing.T) {
	denied := fmt.Errorf("device: %w", &fs.PathError{Op: "open", Path: "/x", Err: syscall.EACCES})
	for _, c := range []struct {
		err  error
		args []string
		uid  int
		want string
	}{
		{denied, []string{"cgpu", "smi", "-o", "wide"}, 1000, "cgpu: needs root: sudo cgpu smi (device: open /x: permission denied)"},
		{denied, []string{"cgpu", "smi"}, 0, "cgpu: device: open /x: permission denied"},
		{denied, []string{"cgpu"}, 1000, "cgpu: needs root: sudo cgpu (device: open /x: permission denied)"},
		{errors.New("cgpu: a\nb"), []string{"cgpu", "smi"}, 1000, "cgpu: a b"},
		{errors.New("name \x1b[2J\u202e"), []string{"cgpu", "smi"}, 0, "cgpu: name ?[2J?"},
	} {
		if got := complaint(c.err, c.args, c.uid); got != c.want {
			t.Errorf("got  %s\nwant %s", got, c.want)
		}
	}
}
