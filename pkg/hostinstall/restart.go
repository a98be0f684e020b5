// SPDX-License-Identifier: Apache-2.0

package hostinstall

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"

	"github.com/opencgpu/cgpu/pkg/atomicfile"
)

func pendingFile() string { return filepath.Join(stateDir(), "pending") }

// pending is the note that the engine has yet to read its configuration: its socket, as it was when that changed.
type pending struct {
	*Installer
	engine
	was  []byte       // the note of a change before; nil: none
	undo func() error // puts back what changed now; nil: nothing did
}

// Changing notes it before the configuration changes, as who is killed in between notes nothing.
func (p *pending) Changing() (err error) {
	if p.was, err = os.ReadFile(pendingFile()); errors.Is(err, fs.ErrNotExist) {
		p.was = nil
	} else if err != nil {
		return err
	}
	err = p.note()
	p.step("pending")
	return err
}

// Changed notes it again: an engine that was restarted in between has not read the change.
func (p *pending) Changed(undo func() error) error {
	p.undo = undo
	return p.note()
}

func (p *pending) note() error {
	if err := os.MkdirAll(stateDir(), 0o755); err != nil {
		return err
	}
	return atomicfile.Write(pendingFile(), []byte(p.state()), 0o644)
}

// PutBack is called where nothing is new for the engine to read.
func (p *pending) PutBack() error {
	p.undo = nil
	if p.was == nil {
		return os.Remove(pendingFile())
	}
	return atomicfile.Write(pendingFile(), p.was, 0o644)
}

// settle has the engine read its configuration, where it changed: it restarts it if it may, and waits for the restart if not.
func (p *pending) settle(ctx context.Context) error {
	for {
		was, err := os.ReadFile(pendingFile())
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		} else if err != nil {
			return fmt.Errorf("%s: %w", p.Verb, err)
		}
		if err := p.restarted(ctx, string(was)); err != nil {
			return err
		}
		if done, err := p.settled(ctx, was); done || err != nil {
			return err
		}
	}
}

// restarted ends when the engine is another one than the one that was.
func (p *pending) restarted(ctx context.Context, was string) error {
	// One that starts has read its files before it makes its socket. So a new one tells nothing of a change that was made just now.
	if now := p.state(); now == was || p.Restart && p.undo != nil {
		if p.Restart {
			if err := p.Refused(p.Installer.Config); err != nil {
				return fmt.Errorf("%s: %w: it is not restarted, as it would not start", p.Verb, err)
			}
		}
		if err := p.Reread(p.Out, p.Installer.Config, p.Restart); err != nil {
			return p.failed(ctx, now, err)
		}
		p.step("restarted")
		if p.state() == now {
			fmt.Fprintf(p.Out, "waits until %s is a new one, by which it is seen that %s was restarted\n", p.socket, p.engine.Name)
		}
	}
	if err := p.until(ctx, func() bool { return p.state() != was && p.state() != noSocket }); err != nil {
		return fmt.Errorf("%s: %s was not restarted: %w", p.Verb, p.engine.Name, err)
	}
	return nil
}

// settled takes the note away, unless another installer has changed the configuration since.
func (p *pending) settled(ctx context.Context, was []byte) (done bool, err error) {
	unlock, err := p.lock(ctx)
	if err != nil {
		return false, fmt.Errorf("%s: %w", p.Verb, err)
	}
	defer unlock()
	p.undo = nil
	switch now, err := os.ReadFile(pendingFile()); {
	case errors.Is(err, fs.ErrNotExist):
		return true, nil
	case err != nil:
		return false, fmt.Errorf("%s: %w", p.Verb, err)
	case !bytes.Equal(now, was):
		return false, nil
	}
	if err := os.Remove(pendingFile()); err != nil {
		return false, fmt.Errorf("%s: %w", p.Verb, err)
	}
	p.step("settled")
	return true, nil
}

// failed is for an engine that did not come back from the restart: what changed is put back, and it is started with that. Then it waits:
// the kubelet would start it again and again, and with it the engine would stop again and again.
func (p *pending) failed(ctx context.Context, before string, cause error) error {
	if p.undo == nil || p.state() == before && p.answers() { // systemd was not reached
		return cause
	}
	err := p.putBack(ctx)
	if err != nil {
		err = fmt.Errorf("%s: %w; %w", p.Verb, cause, err)
	} else {
		err = fmt.Errorf("%s: %w; its files are as they were, and it runs again", p.Verb, cause)
	}
	fmt.Fprintf(p.Out, "%v: repair that, and delete this pod to have it tried again\n", err)
	p.step("put back")
	<-ctx.Done()
	return err
}

func (p *pending) putBack(ctx context.Context) error {
	unlock, err := p.lock(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	if err := p.undo(); err != nil {
		return fmt.Errorf("putting its files back: %w", err)
	}
	if err := p.Reread(p.Out, p.Installer.Config, true); err != nil {
		return fmt.Errorf("its files are as they were, and it does not start with them either: %w", err)
	}
	return os.Remove(pendingFile())
}

// answers reports that somebody listens on the engine's socket.
func (p *pending) answers() bool {
	c, err := net.Dial("unix", p.socket)
	if err == nil {
		c.Close()
	}
	return err == nil
}
