// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/opencgpu/cgpu/pkg/alloc"
)

const (
	cdiKind = DriverName + "/share"
	// cdiVersion is the first in which the name of a device may begin with a digit, as UIDs do. Container runtimes refuse
	// versions that they do not know.
	cdiVersion = "0.5.0"
	// variableClaim tells people, and the sweep, whose file it is. It decides nothing.
	variableClaim = "CGPU_CLAIM"
)

// cdiDevice is the name of a share's device, with which no other share ever has been named: container runtimes cache specs.
func cdiDevice(s alloc.Share) string { return strings.ReplaceAll(s.ID, "/", ".") }

// cdiSpec is the spec of one claim: for each share a device that has the hook by which cgpu-runtime knows it (package alloc).
func cdiSpec(namespace, name, hook string, list []allocated) *specs.Spec {
	spec := &specs.Spec{Version: cdiVersion, Kind: cdiKind}
	spec.ContainerEdits.Env = []string{variableClaim + "=" + namespace + "/" + name}
	for _, a := range list {
		spec.Devices = append(spec.Devices, specs.Device{Name: cdiDevice(a.share), ContainerEdits: specs.ContainerEdits{
			Hooks: []*specs.Hook{{HookName: "createRuntime", Path: hook, Args: alloc.HookArgs(a.share)}},
		}})
	}
	return spec
}

// cdiFolder keeps the specs of the prepared claims, one file for each. A claim is prepared when its file is there: a crash at
// any instruction leaves the old file, the new one, or a draft that no container runtime reads.
type cdiFolder struct {
	dir string
	// step is called before each effect with its name; a test kills there. It is nil outside of tests.
	step func(string) error
}

const (
	cdiPrefix = DriverName + "-share_"
	cdiSuffix = ".json"
	// A draft does not end in .json or .yaml, so nobody reads it.
	draftPrefix = "." + cdiPrefix
	draftSuffix = ".tmp"
	// draftAge is when a draft is a crashed agent's, and not one that another agent writes just now.
	draftAge = time.Minute
)

func (f cdiFolder) path(uid types.UID) string {
	return filepath.Join(f.dir, cdiPrefix+string(uid)+cdiSuffix)
}

func (f cdiFolder) before(step string) error {
	if f.step == nil {
		return nil
	}
	return f.step(step)
}

// write puts a claim's spec in place.
func (f cdiFolder) write(uid types.UID, spec *specs.Spec) (err error) {
	var text bytes.Buffer
	e := json.NewEncoder(&text)
	e.SetEscapeHTML(false)
	e.SetIndent("", " ")
	if err := e.Encode(spec); err != nil {
		return err
	}
	if err := f.before("create"); err != nil {
		return err
	}
	// Not by pkg/atomicfile: the kubelet keeps what was prepared over a power cut, so file and folder are synced.
	draft, err := os.CreateTemp(f.dir, draftPrefix+string(uid)+".*"+draftSuffix)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil && !errors.Is(err, errKilled) {
			_ = os.Remove(draft.Name())
		}
	}()
	for _, effect := range []struct {
		name string
		do   func() error
	}{
		{"write", func() error { _, err := draft.Write(text.Bytes()); return err }},
		{"chmod", func() error { return draft.Chmod(0o644) }},
		{"sync", draft.Sync},
		{"close", draft.Close},
		{"rename", func() error { return os.Rename(draft.Name(), f.path(uid)) }},
		{"sync folder", f.sync},
	} {
		err := f.before(effect.name)
		if err == nil {
			err = effect.do()
		}
		if err != nil {
			_ = draft.Close()
			return err
		}
	}
	return nil
}

// errKilled is what a test's step returns to end as a killed process does: without cleaning up.
var errKilled = errors.New("killed")

// remove takes a claim's spec away; it is no error where there is none.
func (f cdiFolder) remove(uid types.UID) error {
	if err := f.before("remove"); err != nil {
		return err
	}
	if err := os.Remove(f.path(uid)); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return err
	}
	if err := f.before("sync folder"); err != nil {
		return err
	}
	return f.sync()
}

// seen tells one spec of a claim from the next; nil where there is none.
func (f cdiFolder) seen(uid types.UID) os.FileInfo {
	info, err := os.Lstat(f.path(uid))
	if err != nil {
		return nil
	}
	return info
}

// sync makes a rename or a removal outlast a power cut, where the folder is not in memory.
func (f cdiFolder) sync() error {
	dir, err := os.Open(f.dir)
	if err != nil {
		return err
	}
	defer dir.Close()
	return dir.Sync()
}

// prepared is a claim whose spec is in the folder.
type prepared struct {
	uid             types.UID
	namespace, name string
}

// list are the prepared claims, by the files in the folder that are ours and tell whose they are. Old drafts go.
func (f cdiFolder) list() (list []prepared, err error) {
	entries, err := os.ReadDir(f.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var faults []error
	for _, e := range entries {
		path := filepath.Join(f.dir, e.Name())
		if strings.HasPrefix(e.Name(), draftPrefix) && strings.HasSuffix(e.Name(), draftSuffix) {
			if info, err := e.Info(); err == nil && info.Mode().IsRegular() && time.Since(info.ModTime()) > draftAge {
				faults = append(faults, os.Remove(path))
			}
			continue
		}
		uid, ours := strings.CutPrefix(e.Name(), cdiPrefix)
		uid, json := strings.CutSuffix(uid, cdiSuffix)
		if !ours || !json || !e.Type().IsRegular() || isUID(types.UID(uid)) != nil {
			continue
		}
		p, err := readSpec(path)
		if err != nil {
			faults = append(faults, fmt.Errorf("%s: %w: remove it if no pod uses the claim", path, err))
			continue
		}
		p.uid = types.UID(uid)
		list = append(list, p)
	}
	return list, errors.Join(faults...)
}

// readSpec finds out whose a spec is.
func readSpec(path string) (prepared, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return prepared{}, err
	}
	var spec specs.Spec
	if err := json.Unmarshal(text, &spec); err != nil {
		return prepared{}, err
	}
	for _, v := range spec.ContainerEdits.Env {
		claim, ok := strings.CutPrefix(v, variableClaim+"=")
		namespace, name, both := strings.Cut(claim, "/")
		if ok && both && spec.Kind == cdiKind {
			return prepared{namespace: namespace, name: name}, nil
		}
	}
	return prepared{}, errors.New("does not tell its claim")
}
