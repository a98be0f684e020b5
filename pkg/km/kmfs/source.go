// SPDX-License-Identifier: Apache-2.0

// Package kmfs mounts the tree that pkg/km describes (FUSE), on a mount point that nobody else could have put there.
package kmfs

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"syscall"

	"github.com/opencgpu/cgpu/pkg/control"
	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/km"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/node"
	"github.com/opencgpu/cgpu/pkg/schema"
	"github.com/opencgpu/cgpu/pkg/terminal"
	"github.com/opencgpu/cgpu/pkg/view"
)

// Serve mounts the tree and waits until ctx ends or somebody unmounts it.
func Serve(ctx context.Context, w io.Writer, source *Source, dir string, others bool) error {
	if _, err := node.Load(source.RunDir); err != nil { // which makes a missing table: reading does not
		return err
	}
	place, err := newMountPoint(dir)
	if err != nil {
		return fmt.Errorf("km: %w", err)
	}
	defer place.close()
	defer place.remove()
	server, err := mountTree(source, dir, others)
	switch {
	case errors.Is(err, syscall.ENOENT), errors.Is(err, syscall.ENODEV), errors.Is(err, syscall.ENXIO):
		return fmt.Errorf("km: %s: /dev/fuse: %w: load the kernel's module fuse", dir, err)
	case errors.Is(err, syscall.EPERM), errors.Is(err, syscall.EACCES):
		return fmt.Errorf("km: %s: mount: %w: run as root", dir, err)
	case err != nil:
		return fmt.Errorf("km: %s: mount: %w", dir, err)
	}
	ours, err := place.mount()
	if err != nil {
		_ = server.Unmount()
		return fmt.Errorf("km: %s: %w", dir, err)
	}
	fmt.Fprintf(w, "cgpu: km: mounted on %s\n", dir)
	gone := make(chan struct{})
	go func() {
		server.Wait()
		close(gone)
	}()
	select {
	case <-gone:
		return nil
	case <-ctx.Done():
	}
	// A shell that stands in the folder must not keep the mount: it goes out of sight now, and our end closes it.
	if err := place.unmount(ours); err != nil && !errors.Is(err, syscall.EINVAL) {
		return fmt.Errorf("km: %s: unmount: %w: umount it by hand", dir, err)
	}
	return nil
}

// Source is where the files come from: the run dir's table and ledger, and the guards.
type Source struct {
	RunDir  string
	Version string
	Log     io.Writer
	mu      sync.Mutex // of what follows
	slots   km.Slots
	said    map[string]string // by a file's path: why it could not be read
}

// look reads the present state. A stale table is good enough to be shown, as in cgpu smi.
func (s *Source) state() (km.Node, error) {
	t, err := device.Load(s.RunDir)
	if err != nil && (t == nil || !errors.Is(err, device.ErrStale)) {
		return km.Node{}, err
	}
	// Under the lock also this, so that an older state does not overwrite a newer one's numbers.
	s.mu.Lock()
	defer s.mu.Unlock()
	records, cards, err := ledger.Open(s.RunDir).State()
	if err != nil {
		return km.Node{}, err
	}
	s.slots = s.slots.Next(records)
	return km.Node{Version: s.Version, Table: t, Records: records, Cards: cards, Slots: s.slots}, nil
}

// text is what a file says now.
func (s *Source) text(f km.File) (string, error) {
	n, err := s.state()
	if err != nil {
		return "", err
	}
	return n.Text(f, useOf(n.Table))
}

// useOf asks a container's guard, or reads its page where it has none.
func useOf(t *device.Table) func(ledger.Record, string) (km.Use, error) {
	return func(r ledger.Record, uuid string) (u km.Use, err error) {
		s, err := control.StatusOf(t, r)
		if err != nil {
			return u, fmt.Errorf("what container %s uses is not known: %w", view.ShortID(r.ID), err)
		}
		for i, v := range s.VGPUs {
			if v.UUID != uuid {
				continue
			}
			u.Used = v.Used
			for _, p := range s.Processes {
				if i < len(p.Used) {
					u.Processes = append(u.Processes, km.Process{PID: p.PID, Used: p.Used[i]})
				}
			}
		}
		return u, nil
	}
}

// write carries out what was written to a file. A refusal is said here, in one line, because the writer learns no more of it
// than an error number.
func (s *Source) write(f km.File, text []byte) error {
	err := s.change(f, text)
	if err != nil {
		s.complain(f, err)
	}
	return err
}

// maxSaid bounds the files whose last failure is remembered; containers come and go.
const maxSaid = 1024

// unread says why a file cannot be read, unless that is what was said last: with --allow-other everybody reads, as often as he likes.
func (s *Source) complainOfRead(f km.File, err error) {
	s.mu.Lock()
	again := s.said[f.Path] == err.Error()
	if s.said == nil || len(s.said) >= maxSaid {
		s.said = map[string]string{}
	}
	s.said[f.Path] = err.Error()
	s.mu.Unlock()
	if !again {
		s.complain(f, err)
	}
}

// say is for the administrator.
func (s *Source) complain(f km.File, err error) {
	line := terminal.Printable(strings.ReplaceAll(strings.TrimSpace(err.Error()), "\n", " "))
	s.mu.Lock()
	defer s.mu.Unlock()
	fmt.Fprintf(s.Log, "cgpu: km: %s: %s\n", f.Path, line)
}

func (s *Source) change(f km.File, text []byte) error {
	change, err := f.Change(text)
	if err != nil {
		return err
	}
	t, err := node.Load(s.RunDir)
	if err != nil {
		return err
	}
	if change.Card != nil {
		for _, g := range t.GPUs {
			if g.UUID == change.Slice.GPU {
				_, err := control.ChangePolicy(s.RunDir, t, g, change.Card)
				return err
			}
		}
		return km.ErrGone
	}
	old, err := ledger.Open(s.RunDir).Get(change.Slice.Nonce)
	if errors.Is(err, ledger.ErrNotFound) {
		return km.ErrGone
	}
	if err != nil {
		return err
	}
	req := change.Request()
	if short := control.ShortageOf(t, old, req); short != nil {
		if short.Unknown != nil {
			return fmt.Errorf("it has more, and what container %s uses is not known: %w: see cgpu smi; cgpu set --force sets it anyway",
				view.ShortID(old.ID), short.Unknown)
		}
		return fmt.Errorf("%d: container %s uses %s: free some first; cgpu set --force sets it anyway", uint64(*req.Limit),
			view.ShortID(old.ID), view.MiB(short.Use.Used))
	}
	_, err = control.ChangeContainer(s.RunDir, t, old, req)
	return err
}

// Print is the tree as grep -r "" prints it. A container whose use is not known has no meminfo.
func (s *Source) Print(w io.Writer) error {
	files, err := s.Files()
	for _, f := range files {
		for line := range strings.Lines(f.Text) {
			if _, err := fmt.Fprintf(w, "%s:%s", f.Path, line); err != nil {
				return err
			}
		}
	}
	return err
}

// Files are all that can be read, with what they say now.
func (s *Source) Files() ([]schema.KMFile, error) {
	if _, err := node.Load(s.RunDir); err != nil {
		return nil, err
	}
	n, err := s.state()
	if err != nil {
		return nil, err
	}
	files := []schema.KMFile{}
	for _, f := range n.Files() {
		text, err := n.Text(f, useOf(n.Table))
		if err != nil {
			s.complain(f, err)
			continue
		}
		files = append(files, schema.KMFile{Path: f.Path, Text: text})
	}
	return files, nil
}
