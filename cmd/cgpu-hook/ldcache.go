package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/ldcache"
)

const (
	cacheFile = "/etc/ld.so.cache"
	// confFile keeps our libraries found where somebody calls ldconfig in the container. The name is fixed, so that a restarted
	// container has one and not many; it sorts first, so that the driver's libraries win over stubs in the image.
	confFile = "/etc/ld.so.conf.d/00-cgpu.conf"
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
	if err := r.write(confFile, []byte(strings.Join(j.libDirs, "\n")+"\n")); err != nil {
		return err
	}
	if err := includeConf(r); err != nil {
		return err
	}
	if len(j.libraries) == 0 {
		return nil
	}
	old, err := r.read(cacheFile, ldcache.MostSize)
	var cache ldcache.Cache
	if err == nil {
		cache, err = ldcache.Parse(old)
	}
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		fmt.Fprintf(stderr, "cgpu-hook: the image's libraries are left out of %s: %v\n", cacheFile, err)
	}
	text := cache.With(j.libraries).Encode()
	if bytes.Equal(text, old) { // a restart
		return nil
	}
	return r.write(cacheFile, text)
}

// includeConf gives an image without /etc/ld.so.conf one that reads ours.
func includeConf(r root) error {
	const file = "/etc/ld.so.conf"
	fd, err := r.open(file, unix.O_PATH, 0)
	if err == nil {
		return unix.Close(fd)
	}
	if !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return r.write(file, []byte("include /etc/ld.so.conf.d/*.conf\n"))
}
