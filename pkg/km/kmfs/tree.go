// SPDX-License-Identifier: Apache-2.0

package kmfs

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/opencgpu/cgpu/pkg/km"
	"github.com/opencgpu/cgpu/pkg/ledger"
)

// fsName is what mountinfo has behind "fuse.".
const fsName = "cgpu_km"

// mountTree mounts the tree. Nothing is cached by the kernel: containers come and go without telling us.
func mountTree(source *Source, dir string, others bool) (*fuse.Server, error) {
	var never time.Duration
	o := &fs.Options{EntryTimeout: &never, AttrTimeout: &never, NegativeTimeout: &never}
	o.FsName, o.Name = "cgpu", fsName
	o.DirectMountStrict = true // no fusermount: it is not on every host, and we are root
	o.DirectMountFlags = syscall.MS_NOSUID | syscall.MS_NODEV | syscall.MS_NOEXEC
	o.DisableXAttrs = true
	if others {
		o.AllowOther = true
		o.Options = append(o.Options, "default_permissions") // else nobody would look at the modes
	}
	return fs.Mount(dir, &folder{tree: &tree{source: source, mounted: time.Now(), others: others}}, o)
}

// tree is what the nodes of one mount share.
type tree struct {
	source  *Source
	mounted time.Time
	others  bool
}

// attr is what stat says. As in /proc the size is 0: it is not known before the file is read.
func (t *tree) attr(mode uint32, a *fuse.Attr) {
	if t.others {
		mode &^= 0o022
	}
	a.Mode, a.Nlink, a.Blksize = mode, 1, 4096
	a.SetTimes(&t.mounted, &t.mounted, &t.mounted)
}

// errno is what the reader or writer of a file learns of an error.
func (t *tree) errno(err error) syscall.Errno {
	switch {
	case err == nil:
		return fs.OK
	case errors.Is(err, km.ErrGone), errors.Is(err, ledger.ErrNotFound):
		return syscall.ENOENT
	case errors.Is(err, km.ErrReadOnly):
		return syscall.EACCES
	}
	return syscall.EIO
}

// inode is a number for a path; a container with the ID of an earlier one is another's.
func inode(parts ...string) uint64 {
	h := fnv.New64a()
	for _, p := range parts {
		fmt.Fprintf(h, "%s\x00", p)
	}
	return h.Sum64()>>1 | 2 // 0 and 1 have meanings of their own, the upper half is go-fuse's
}

// folder is a folder: path is below the mount point and ends with a slash, or is empty.
type folder struct {
	fs.Inode
	tree *tree
	path string
}

var (
	_ fs.NodeGetattrer = (*folder)(nil)
	_ fs.NodeLookuper  = (*folder)(nil)
	_ fs.NodeReaddirer = (*folder)(nil)
)

func (d *folder) Getattr(_ context.Context, _ fs.FileHandle, out *fuse.AttrOut) syscall.Errno {
	d.tree.attr(syscall.S_IFDIR|0o555, &out.Attr)
	out.Nlink = 2
	return fs.OK
}

// children lists what is in the folder: files, and folders as files with no kind, of which a container's has its slice.
func (d *folder) children() ([]km.File, error) {
	n, err := d.tree.source.state()
	if err != nil {
		return nil, err
	}
	var list []km.File
	for _, f := range n.Files() {
		rest, below := strings.CutPrefix(f.Path, d.path)
		if !below {
			continue
		}
		name, _, folder := strings.Cut(rest, "/")
		switch {
		case !folder:
			list = append(list, f)
		case len(list) == 0 || list[len(list)-1].Path != d.path+name: // files are sorted by path
			child := km.File{Path: d.path + name}
			if d.path != "" {
				child.Slice = f.Slice
			}
			list = append(list, child)
		}
	}
	return list, nil
}

func (d *folder) Lookup(ctx context.Context, name string, out *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	list, err := d.children()
	if err != nil {
		return nil, d.tree.errno(err)
	}
	for _, f := range list {
		if f.Path != d.path+name {
			continue
		}
		attr := fs.StableAttr{Mode: syscall.S_IFREG, Ino: inode(f.Path, f.Slice.Nonce)}
		if f.Kind == "" {
			attr.Mode = syscall.S_IFDIR
			d.tree.attr(syscall.S_IFDIR|0o555, &out.Attr)
			return d.NewInode(ctx, &folder{tree: d.tree, path: f.Path + "/"}, attr), fs.OK
		}
		d.tree.attr(syscall.S_IFREG|uint32(f.Kind.Mode()), &out.Attr)
		return d.NewInode(ctx, &file{tree: d.tree, file: f}, attr), fs.OK
	}
	return nil, syscall.ENOENT
}

func (d *folder) Readdir(context.Context) (fs.DirStream, syscall.Errno) {
	list, err := d.children()
	if err != nil {
		return nil, d.tree.errno(err)
	}
	var entries []fuse.DirEntry
	for _, f := range list {
		e := fuse.DirEntry{Name: strings.TrimPrefix(f.Path, d.path), Mode: syscall.S_IFREG, Ino: inode(f.Path, f.Slice.Nonce)}
		if f.Kind == "" {
			e.Mode = syscall.S_IFDIR
		}
		entries = append(entries, e)
	}
	return fs.NewListDirStream(entries), fs.OK
}

// file is a file.
type file struct {
	fs.Inode
	tree *tree
	file km.File
}

var (
	_ fs.NodeGetattrer = (*file)(nil)
	_ fs.NodeSetattrer = (*file)(nil)
	_ fs.NodeOpener    = (*file)(nil)
)

func (f *file) Getattr(_ context.Context, _ fs.FileHandle, out *fuse.AttrOut) syscall.Errno {
	f.tree.attr(syscall.S_IFREG|uint32(f.file.Kind.Mode()), &out.Attr)
	return fs.OK
}

// Setattr lets a shell's > truncate what has no length. Modes and owners stay.
func (f *file) Setattr(ctx context.Context, h fs.FileHandle, in *fuse.SetAttrIn, out *fuse.AttrOut) syscall.Errno {
	if in.Valid&(fuse.FATTR_MODE|fuse.FATTR_UID|fuse.FATTR_GID) != 0 {
		return syscall.EPERM
	}
	return f.Getattr(ctx, h, out)
}

func (f *file) Open(_ context.Context, flags uint32) (fs.FileHandle, uint32, syscall.Errno) {
	if flags&syscall.O_ACCMODE != syscall.O_RDONLY && f.file.Kind.Mode()&0o222 == 0 {
		return nil, 0, syscall.EACCES // root, who passes any mode, too
	}
	return &handle{file: f}, fuse.FOPEN_DIRECT_IO, fs.OK
}

// handle is an open file: what it says is made when it is read from the beginning, and stays for a reader who takes it in
// pieces.
type handle struct {
	file *file
	mu   sync.Mutex
	text string
}

var (
	_ fs.FileReader = (*handle)(nil)
	_ fs.FileWriter = (*handle)(nil)
)

func (h *handle) Read(_ context.Context, dest []byte, off int64) (fuse.ReadResult, syscall.Errno) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if off == 0 {
		text, err := h.file.tree.source.text(h.file.file)
		if err != nil {
			if !errors.Is(err, km.ErrGone) {
				h.file.tree.source.complainOfRead(h.file.file, err)
			}
			return nil, h.file.tree.errno(err)
		}
		h.text = text
	}
	if off >= int64(len(h.text)) {
		return fuse.ReadResultData(nil), fs.OK
	}
	return fuse.ReadResultData([]byte(h.text[off:min(int64(len(h.text)), off+int64(len(dest)))])), fs.OK
}

// Write takes every write for a whole number, wherever it goes, as cGPU does.
func (h *handle) Write(_ context.Context, data []byte, _ int64) (uint32, syscall.Errno) {
	switch err := h.file.tree.source.write(h.file.file, data); {
	case err == nil:
		return uint32(len(data)), fs.OK
	case errors.Is(err, km.ErrGone):
		return 0, syscall.ENOENT
	}
	return 0, syscall.EINVAL
}
