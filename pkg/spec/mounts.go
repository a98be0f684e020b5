// SPDX-License-Identifier: Apache-2.0

package spec

import (
	"encoding/json"
	"fmt"
	"path"
	"slices"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/opencgpu/cgpu/pkg/page"
)

// Where the container sees what the limiter needs. Its vGPU page is at page.Path.
const (
	LimiterPath = "/run/cgpu/libcgpu.so"
	preloadPath = "/etc/ld.so.preload"
)

// Options of the limiter's mounts. The library is mapped executable, so it cannot be noexec. The others lie on the run
// directory's tmpfs, whose own flags a mount in a user namespace may not drop.
var (
	libraryOptions  = []string{"bind", "rprivate", "ro", "nosuid", "nodev"}
	dataOptions     = []string{"bind", "rprivate", "ro", "nosuid", "nodev", "noexec"}
	writableOptions = []string{"bind", "rprivate", "rw", "nosuid", "nodev", "noexec"}
)

// limiterMounts are the mounts that the limiter needs.
func (p *Plan) limiterMounts() []specs.Mount {
	var mounts []specs.Mount
	if p.Limiter != "" {
		mounts = append(mounts, bindMount(LimiterPath, p.Limiter, libraryOptions))
	}
	switch {
	case p.Page == "":
	case p.PageWritable:
		mounts = append(mounts, bindMount(page.Path, p.Page, writableOptions))
	default:
		mounts = append(mounts, bindMount(page.Path, p.Page, dataOptions))
	}
	if p.Preload != "" {
		mounts = append(mounts, bindMount(preloadPath, p.Preload, dataOptions))
	}
	return mounts
}

// nodeOptions mount a device node of the simulated driver. Not nodev, or it could not be opened.
var nodeOptions = []string{"bind", "rprivate", "rw", "nosuid", "noexec"}

// editMounts adds the driver files, the limiter's files and, for the simulated driver, the nodes.
//
// A driver file whose place is taken stays out: an earlier injector put the same one there, or the user wants his own.
// The place of a node is ours: what somebody else mounts over an NVIDIA node goes, and so does a mount of the node of
// a GPU that was not granted. The places of the limiter's files are ours as well, if it has any there; what else a
// container mounts below /run/cgpu is its own business.
func editMounts(doc *Document, p *Plan) error {
	raw, err := doc.list("mounts")
	if err != nil {
		return err
	}
	hidden := map[string]bool{}
	for _, d := range slices.Concat(p.Hidden, p.Nodes()) {
		hidden[d.Path], hidden[d.HostPath] = true, true
	}
	places := map[string]bool{}
	for _, m := range p.limiterMounts() {
		places[m.Destination] = true
	}
	taken := map[string]bool{}
	var kept [][]byte
	for i := range raw {
		var m specs.Mount
		if err := json.Unmarshal(raw[i], &m); err != nil {
			return fmt.Errorf("mounts[%d]: %w", i, err)
		}
		to := path.Clean("/" + m.Destination)
		if places[to] || hidden[to] || isNVIDIAName(to) ||
			(m.Source != "" && (hidden[path.Clean(m.Source)] || isNVIDIAName(path.Clean(m.Source)))) {
			continue
		}
		taken[to] = true
		kept = append(kept, raw[i])
	}
	before := len(kept)
	add := func(m specs.Mount) error {
		if to := path.Clean(m.Destination); !taken[to] {
			taken[to] = true
			// The runtime takes 150 µs for each. Arguments of the hook have "::" between two paths.
			if p.HookMounts && slices.Equal(m.Options, driverOptions) && !strings.Contains(m.Source+m.Destination, "::") {
				p.hooked = append(p.hooked, m)
				return nil
			}
			b, err := json.Marshal(m)
			if err != nil {
				return err
			}
			kept = append(kept, b)
		}
		return nil
	}
	for _, m := range p.Mounts {
		if err := add(bindMount(m.Container, m.Host, m.Options)); err != nil {
			return err
		}
	}
	for _, m := range p.limiterMounts() {
		if err := add(m); err != nil {
			return err
		}
	}
	for _, d := range p.Nodes() {
		if d.Bind {
			if err := add(bindMount(d.Path, d.HostPath, nodeOptions)); err != nil {
				return err
			}
		}
	}
	if before == len(raw) && len(kept) == before {
		return nil
	}
	return doc.setList(kept, "mounts")
}

// driverOptions are those of an ordinary driver file, as NVIDIA's CDI specs have them and cgpu-hook mounts it.
var driverOptions = []string{"ro", "nosuid", "nodev", "rbind", "rprivate"}

func bindMount(at, of string, options []string) specs.Mount {
	return specs.Mount{Destination: at, Type: "bind", Source: of, Options: options}
}
