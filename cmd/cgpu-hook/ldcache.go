// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/ldcache"
)

// updateCache makes the container's dynamic linker find the driver's libraries: they are put before what the image's cache has.
// Images with musl ignore what it writes.
//
// No program does it, and the host's ldconfig least: the image is as its author made it, and in the root's /proc, or by "..", he
// would find the host, which is in sight until the runtime changes the root.
func updateCache(r root, j job, stderr io.Writer) error {
	if len(j.libDirs) == 0 {
		return nil
	}
	etc, err := r.folder("/etc")
	if err != nil {
		return err
	}
	defer etc.close()
	// Each by itself, and first what counts most.
	for _, write := range []func() error{
		func() error { return writeCache(etc, j.libraries, stderr) },
		func() error { return writeConf(r, j.libDirs) },
		func() error { return includeConf(etc) },
	} {
		if err := forgive(stderr, write()); err != nil {
			return err
		}
	}
	return nil
}

// writeCache puts libraries into the image's cache.
func writeCache(etc folder, libraries []ldcache.Entry, stderr io.Writer) error {
	const file = "ld.so.cache"
	if len(libraries) == 0 {
		fmt.Fprintln(stderr, "cgpu-hook: no ld cache: the node's table has no names of libraries: run cgpu refresh --force")
		return nil
	}
	old, err := etc.readFile(file, ldcache.MostSize)
	var cache ldcache.Cache
	switch {
	case err == nil:
		cache, err = ldcache.Parse(old)
	case errors.Is(err, unix.EXDEV): // the user mounted one
		return err
	}
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		fmt.Fprintf(stderr, "cgpu-hook: the image's libraries are left out of /etc/ld.so.cache: %v\n", err)
	}
	return etc.write(file, cache.With(libraries).Encode())
}

// writeConf keeps our libraries found where somebody calls ldconfig in the container. The name is fixed, so that a restarted container
// has one and not many; it sorts first, so that the driver's libraries win over stubs in the image.
func writeConf(r root, libDirs []string) error {
	folder, err := r.folder("/etc/ld.so.conf.d")
	if err != nil {
		return err
	}
	defer folder.close()
	return folder.write("00-cgpu.conf", []byte(strings.Join(libDirs, "\n")+"\n"))
}

// includeConf gives an image without /etc/ld.so.conf one that reads ours.
func includeConf(etc folder) error {
	const file = "ld.so.conf"
	fd, err := etc.open(file)
	switch {
	case err == nil:
		return unix.Close(fd)
	case errors.Is(err, os.ErrNotExist):
		return etc.write(file, []byte("include /etc/ld.so.conf.d/*.conf\n"))
	case errors.Is(err, unix.EXDEV): // the user mounted one
		return nil
	}
	return err
}
