// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/inside"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/page"
	"github.com/opencgpu/cgpu/pkg/spec"
)

// image is what matters of a container's root folder to a preloaded library.
type image struct {
	// glibc: the image has a loader that reads /etc/ld.so.preload, as musl's does not. Also set when the root could not be
	// looked into: the file harms no image.
	glibc bool
	// preload is the content of the image's own /etc/ld.so.preload; empty: it has none, or an empty one, which is what our
	// mount leaves behind in a committed image.
	preload []byte
}

// loaders are the names of glibc's loader, which every program has in it and which are therefore the same in every image.
var loaders = map[string]string{
	"amd64": "/lib64/ld-linux-x86-64.so.2",
	"arm64": "/lib/ld-linux-aarch64.so.1",
}

// mostPreload bounds an image's /etc/ld.so.preload.
const mostPreload = 64 << 10

// errUnread: the image's /etc/ld.so.preload is not what it should be.
var errUnread = errors.New("is no regular file of at most 64 KiB that can be read")

// readImage looks into a container's root folder. All in it belongs to the image, perhaps to an attacker: the kernel resolves
// every path as if the folder were "/", so that no link leads out of it, and only regular files are opened.
func readImage(root string) (image, error) {
	fd, err := unix.Open(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return image{glibc: true}, nil // runc will tell, or may do what we may not
	}
	defer unix.Close(fd)
	switch found, err := open(fd, loaders[runtime.GOARCH]); {
	case err == nil:
		unix.Close(found)
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP):
		return image{}, nil
	default: // a kernel without openat2 (before 5.6), a filter that forbids it, a folder that we may not enter
		return image{glibc: true}, nil
	}
	text, err := readInside(fd, "/etc/ld.so.preload")
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) {
		err = nil
	}
	return image{glibc: true, preload: bytes.TrimSpace(text)}, err
}

// open opens the name of a file below root, without opening the file.
func open(root int, name string) (int, error) {
	return inside.Open(root, name, unix.O_PATH, inside.AnyMount)
}

// readInside reads a small regular file below root.
func readInside(root int, name string) ([]byte, error) {
	fd, err := open(root, name)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) {
		return nil, err
	}
	if err != nil {
		return nil, errUnread
	}
	defer unix.Close(fd)
	text, err := inside.Read(fd, mostPreload)
	if err != nil {
		return nil, errUnread
	}
	return text, nil
}

// preloadFile chooses what becomes the container's /etc/ld.so.preload, and makes it: LD_PRELOAD alone is not in the
// environment of programs that clear it, and set-uid programs take no path from it. Empty: the container keeps its own file. It is a
// file of this container's alone, since a tenant can stall whoever opens one that he sees (launch.MakePage).
//
// One that the user mounts there himself stays, since it is his and not the image's; the guard holds without the limiter. In
// preload mode, where it does not, such a container is refused.
func preloadFile(doc *spec.Document, bundle string, record *ledger.Record) (string, error) {
	refuse := func(err error) (string, error) {
		if record.Preload {
			return "", fmt.Errorf("%w: in preload mode it has to name the limiter: name your libraries in LD_PRELOAD, "+
				"or set enforcement = \"guard\" in cgpu.toml", err)
		}
		return "", nil
	}
	own, err := doc.Own()
	if err != nil {
		return "", err
	}
	if own.Preload != "" {
		return refuse(fmt.Errorf("cgpu-runtime: mount %s brings an /etc/ld.so.preload of its own", own.Preload))
	}
	root, err := doc.Root()
	if err != nil || root == "" {
		return "", err // runc will tell
	}
	if !filepath.IsAbs(root) {
		root = filepath.Join(bundle, root)
	}
	found, err := readImage(root)
	switch {
	case err != nil:
		return refuse(fmt.Errorf("cgpu-runtime: the image's /etc/ld.so.preload %w", err))
	case !found.glibc && own.Loader == "":
		return "", nil
	}
	content := []byte(preloadLine)
	if len(found.preload) > 0 {
		content = append(append(content, found.preload...), '\n')
	}
	path := page.PreloadFile(record.Page)
	return path, writeFile(path, content)
}

// preloadLine names the limiter in an ld.so.preload.
const preloadLine = spec.LimiterPath + "\n"

// writeFile writes a file that the container may read. Nobody looks at it before we are done: its folder is that of our nonce.
func writeFile(path string, content []byte) error {
	err := os.WriteFile(path, content, 0o444)
	if err == nil {
		err = os.Chmod(path, 0o444) // whatever the umask
	}
	if err != nil {
		return fmt.Errorf("cgpu-runtime: %w", err)
	}
	return nil
}
