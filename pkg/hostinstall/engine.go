// SPDX-License-Identifier: Apache-2.0

package hostinstall

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/install"
	"github.com/opencgpu/cgpu/pkg/terminal"

	engines "github.com/opencgpu/cgpu/pkg/engine"
)

// engine is the node's, with the socket on which it listens.
type engine struct {
	install.Target
	socket string
	run    string // the folder in which containerd keeps what runs
}

// An engine makes its socket anew at each start. k3s and RKE2 have one place for theirs, and are told apart by their folders.
var sockets = map[string]string{
	"containerd": "/run/containerd/containerd.sock", "crio": "/run/crio/crio.sock",
	"k3s": "/run/k3s/containerd/containerd.sock", "rke2": "/run/k3s/containerd/containerd.sock",
}

// evidence is the file that tells that an engine is there.
func evidence(name string) string {
	switch name {
	case "k3s":
		return engines.K3sConfig
	case "rke2":
		return engines.RKE2Config
	}
	return sockets[name]
}

// findEngine is the engine that was named, or the one that is there. Which of two the kubelet uses is the administrator's to say.
func (i *Installer) findEngine() (e engine, err error) {
	var found []string
	for _, t := range install.Targets() {
		switch {
		case !t.Kubelet:
			continue
		case i.Engine == "auto":
			if _, err := os.Stat(evidence(t.Name)); err != nil {
				continue
			}
		case i.Engine != t.Name:
			continue
		}
		found = append(found, t.Name)
		e = engine{Target: t, socket: cmp.Or(i.Socket, sockets[t.Name])}
	}
	switch len(found) {
	case 0:
		return e, errors.New("auto: no containerd, k3s, rke2 or crio runs on this node: name the engine, and its socket with --engine-socket")
	case 1:
		i.Config = cmp.Or(i.Config, e.Target.Config(i.Order.Name))
		if _, err := os.Stat(e.socket); err != nil {
			return e, fmt.Errorf("%s: no socket %s is there: start it, or name its socket with --engine-socket", e.Name, e.socket)
		}
		e.run = cmp.Or(e.State(i.Config), filepath.Dir(e.socket))
		return e, nil
	}
	return e, fmt.Errorf("auto: this node has %s: name the one that the kubelet uses", strings.Join(found, " and "))
}

const noSocket = "none"

// state tells one start of the engine from the next.
func (e engine) state() string {
	var s unix.Stat_t
	if err := unix.Stat(e.socket, &s); err != nil {
		return noSocket
	}
	return fmt.Sprintf("%d %d.%09d", s.Ino, s.Mtim.Sec, s.Mtim.Nsec)
}

// until waits for something.
func (i *Installer) until(ctx context.Context, done func() bool) error {
	tick := time.NewTicker(i.poll)
	defer tick.Stop()
	for !done() {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
	return nil
}

// unused waits until no container has a program of ours: its engine calls it again to stop and to delete it.
func (i *Installer) unused(ctx context.Context, e engine) error {
	said := ""
	err := i.until(ctx, func() bool {
		list := i.users(e)
		if line := strings.Join(list, ", "); line != said && line != "" {
			said = line
			fmt.Fprintf(i.Out, "waits for the end of what runs by programs of %s: %s\n", i.Dir, line)
		}
		return len(list) == 0
	})
	if err != nil {
		return fmt.Errorf("uninstall: %s is in use: %w", i.Dir, err)
	}
	return nil
}

// users are the containers and processes of programs that an installer put onto the node. Tenants choose names and arguments of theirs.
func (i *Installer) users(e engine) (list []string) {
	below := func(path string) bool { return strings.HasPrefix(path, i.Dir+"/") }
	for _, dir := range []string{e.run, filepath.Dir(e.socket)} {
		tasks, _ := filepath.Glob(filepath.Join(dir, "io.containerd.runtime.v2.task/*/*/runtime"))
		for _, file := range tasks {
			if program, err := os.ReadFile(file); err == nil && below(string(program)) {
				list = append(list, "container "+filepath.Base(filepath.Dir(file)))
			}
		}
	}
	if e.Name == "crio" {
		list = append(list, sandboxes(i.Name)...)
	}
	programs := i.programs()
	processes, _ := filepath.Glob("/proc/[0-9]*")
	for _, p := range processes {
		name := programs[identity(filepath.Join(p, "exe"))]
		if name == "" && monitors(p) && slices.ContainsFunc(arguments(p), below) {
			name = "conmon"
		}
		if name != "" {
			list = append(list, fmt.Sprintf("process %s (%s)", filepath.Base(p), name))
		}
	}
	for n := range list {
		list[n] = terminal.Printable(list[n])
	}
	slices.Sort(list)
	return slices.Compact(list)
}

// file is what one is known by, whatever it is called.
type file struct{ dev, ino uint64 }

// identity asks no file system that is elsewhere, or is a tenant's (FUSE), and may never answer: what the kernel knows does.
func identity(path string) (f file) {
	var s unix.Statx_t
	if unix.Statx(unix.AT_FDCWD, path, unix.AT_STATX_DONT_SYNC, unix.STATX_INO, &s) == nil {
		f = file{unix.Mkdev(s.Dev_major, s.Dev_minor), s.Ino}
	}
	return f
}

// programs are the files of all versions, by what a process that runs one shows.
func (i *Installer) programs() map[file]string {
	list := map[file]string{}
	for _, pattern := range []string{"versions/*/bin/*", "versions/*/lib/cgpu/*", "versions/.*/bin/*"} {
		paths, _ := filepath.Glob(filepath.Join(i.Dir, pattern))
		for _, path := range paths {
			if f := identity(path); f != (file{}) {
				list[f] = filepath.Base(path)
			}
		}
	}
	return list
}

// monitors tells a monitor of CRI-O's, whose arguments name the runtime. Its program may have been replaced since it started, and others
// may call theirs so: a tenant has another root, and a user of the machine another number.
func monitors(process string) bool {
	exe, _ := os.Readlink(filepath.Join(process, "exe"))
	status, _ := os.ReadFile(filepath.Join(process, "status"))
	return filepath.Base(strings.TrimSuffix(exe, " (deleted)")) == "conmon" && bytes.Contains(status, []byte("\nUid:\t0\t")) &&
		identity(filepath.Join(process, "root")) == identity("/")
}

// sandboxes are the pods of a runtime that CRI-O has yet to delete, for which it calls the runtime; their containers may have ended.
func sandboxes(handler string) (list []string) {
	files, _ := filepath.Glob("/run/containers/storage/*-containers/*/userdata/config.json")
	for _, file := range files {
		var config struct {
			Annotations map[string]string `json:"annotations"`
		}
		text, err := os.ReadFile(file)
		if err == nil && json.Unmarshal(text, &config) == nil && config.Annotations["io.kubernetes.cri-o.RuntimeHandler"] == handler {
			list = append(list, "pod "+filepath.Base(filepath.Dir(filepath.Dir(file))))
		}
	}
	return list
}

func arguments(process string) (list []string) {
	text, _ := os.ReadFile(filepath.Join(process, "cmdline"))
	for a := range bytes.SplitSeq(text, []byte{0}) {
		list = append(list, string(a))
	}
	return list
}
