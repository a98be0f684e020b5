// SPDX-License-Identifier: Apache-2.0

// Package km is the tree of files that Alibaba's cGPU shows as /proc/cgpu_km, made from cgpu's state, so that scripts
// written for cGPU go on working.
//
// It is pure: node table and ledger become a list of files with their text, and a text that is written to one becomes a
// change for the ledger. cmd/cgpu (cgpu km) shows the files and carries the changes out; docs/km.md tells users what is
// mapped. Names, units, modes and line ends are those of cGPU's published procfs code (version 0.8.8); the comments say
// where that leaves something open.
package km

import (
	"cmp"
	"io/fs"
	"path"
	"regexp"
	"slices"
	"strconv"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// Node is the state that the tree is made from, of one moment.
type Node struct {
	Version string // of cgpu
	Table   *device.Table
	Records []ledger.Record
	Cards   map[string]sched.Card
	Slots   Slots
}

// Kind is what a file is about; its text is the file's name.
type Kind string

// Files of the tree.
const (
	Version    Kind = "version"
	MaxInst    Kind = "max_inst"
	Policy     Kind = "policy"
	PrioRatio  Kind = "prio_ratio"
	FreeWeight Kind = "free_weight"
	ID         Kind = "id"
	MemSize    Kind = "memsize"
	MemInfo    Kind = "meminfo"
	Weight     Kind = "weight"
)

// ofGPU and ofContainer are the files of a GPU's folder and of a container's below it.
var (
	ofGPU       = []Kind{FreeWeight, MaxInst, Policy, PrioRatio}
	ofContainer = []Kind{ID, MemInfo, MemSize, Weight}
)

// Mode is the file's mode in cGPU. Everybody may write there; cgpu km lets only root in, unless it is told otherwise.
func (k Kind) Mode() fs.FileMode {
	switch k {
	case MaxInst, Policy, PrioRatio, MemSize, Weight:
		return 0o666
	}
	return 0o444
}

// Slice is one container's part of one GPU. The nonce is its record's: another container, also a later one, may have the ID.
type Slice struct {
	GPU   string // UUID
	Nonce string
}

// File is one file of the tree. Two files with the same path are the same only if their slices are.
type File struct {
	Path string // below the mount point, such as 0/3f2a9c01d4e5/memsize
	Kind Kind
	// Slice has a GPU only in a GPU's files, and nothing in those of the node.
	Slice Slice
}

// nameLength is the length of a container's folder's name: the beginning of the ID that Docker shows.
const nameLength = 12

// Files lists the tree's files by path. Containers that have whole GPUs only are none of cGPU's business and not in it.
func (n Node) Files() []File {
	files := []File{{Path: string(Version), Kind: Version}}
	for _, g := range n.Table.GPUs {
		folder := strconv.Itoa(g.Index)
		for _, k := range ofGPU {
			files = append(files, File{Path: path.Join(folder, string(k)), Kind: k, Slice: Slice{GPU: g.UUID}})
		}
		for name, slice := range named(g.UUID, n.Records) {
			for _, k := range ofContainer {
				files = append(files, File{Path: path.Join(folder, name, string(k)), Kind: k, Slice: slice})
			}
		}
	}
	slices.SortFunc(files, func(a, b File) int { return cmp.Compare(a.Path, b.Path) })
	return files
}

// named gives the containers of a GPU their folders' names. Where the first twelve characters are those of several, all of
// these have their whole IDs, and where the ID is, their nonces: whoever chooses a container's name must not get what was meant
// for another. An ID that is no file's name, or that of one beside it, has no folder.
func named(uuid string, records []ledger.Record) map[string]Slice {
	begin, whole := map[string]int{}, map[string]int{}
	records = slices.DeleteFunc(slices.Clone(records), func(r ledger.Record) bool {
		return !slices.ContainsFunc(r.VGPUs, func(v ledger.VGPU) bool { return v.UUID == uuid })
	})
	for _, r := range records {
		begin[shorten(r.ID)]++
		whole[r.ID]++
	}
	names := map[string]Slice{}
	for _, r := range records {
		name := shorten(r.ID)
		switch {
		case whole[r.ID] > 1:
			name = r.Nonce
		case begin[name] > 1:
			name = r.ID
		}
		if fileName(name) {
			names[name] = Slice{GPU: uuid, Nonce: r.Nonce}
		}
	}
	return names
}

func shorten(id string) string { return id[:min(len(id), nameLength)] }

// idText is what runc and crun take for an ID.
var idText = regexp.MustCompile(`^[A-Za-z0-9_+.-]{1,255}$`)

// fileName: a folder beside the files of a GPU can have this name.
func fileName(name string) bool {
	return idText.MatchString(name) && name != "." && name != ".." && !slices.Contains(ofGPU, Kind(name))
}

// slice finds what a file is about. ok is false when the container is gone.
func (n Node) slice(s Slice) (r ledger.Record, v ledger.VGPU, ok bool) {
	for _, r := range n.Records {
		if r.Nonce != s.Nonce {
			continue
		}
		for _, v := range r.VGPUs {
			if v.UUID == s.GPU {
				return r, v, true
			}
		}
	}
	return r, v, false
}

// gpu finds the GPU that a file is about.
func (n Node) gpu(uuid string) (device.GPU, bool) {
	i := slices.IndexFunc(n.Table.GPUs, func(g device.GPU) bool { return g.UUID == uuid })
	if i < 0 {
		return device.GPU{}, false
	}
	return n.Table.GPUs[i], true
}
