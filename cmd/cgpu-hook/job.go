// SPDX-License-Identifier: Apache-2.0

package main

import (
	"flag"
	"fmt"
	"io"
	"path"
	"strconv"
	"strings"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/ldcache"
)

// job is what setup has to do, as spec.Apply wrote it into the hook's arguments.
type job struct {
	root      string // the container's
	binds     []bind
	links     []device.Link
	libDirs   []string
	libraries []ldcache.Entry
}

func parseJob(args []string) (job, error) {
	var j job
	flags := flag.NewFlagSet("setup", flag.ContinueOnError)
	flags.SetOutput(io.Discard) // the error says it all, in one line
	flags.Func("mount", "HOST::PATH of a driver file", func(v string) error {
		host, to, _ := strings.Cut(v, "::")
		if !path.IsAbs(host) || !path.IsAbs(to) || path.Clean(to) == "/" {
			return fmt.Errorf("%q: want HOST::/PATH", v)
		}
		j.binds = append(j.binds, bind{host: host, path: path.Clean(to)})
		return nil
	})
	flags.Func("link", "TARGET::PATH of a symbolic link", func(v string) error {
		target, to, ok := strings.Cut(v, "::")
		if !ok || target == "" || !path.IsAbs(to) || path.Base(to) == "/" {
			return fmt.Errorf("%q: want TARGET::/PATH", v)
		}
		j.links = append(j.links, device.Link{Target: target, Path: path.Clean(to)})
		return nil
	})
	flags.Func("lib", "FLAGS::NAME::PATH of a library for the ld cache", func(v string) error {
		kind, rest, _ := strings.Cut(v, "::")
		name, file, _ := strings.Cut(rest, "::")
		number, err := strconv.ParseInt(kind, 0, 32)
		if err != nil || name == "" || path.Base(name) != name || !path.IsAbs(file) {
			return fmt.Errorf("%q: want FLAGS::NAME::/PATH", v)
		}
		j.libraries = append(j.libraries, ldcache.Entry{Name: name, Path: path.Clean(file), Flags: int32(number)})
		return nil
	})
	flags.Func("lib-dir", "folder for ld.so.conf.d", func(v string) error {
		if !path.IsAbs(v) || strings.ContainsAny(v, "\n\r#") {
			return fmt.Errorf("%q: want an absolute path", v)
		}
		j.libDirs = append(j.libDirs, path.Clean(v))
		return nil
	})
	flags.StringVar(&j.root, "root", "", "the container's root folder")
	if err := flags.Parse(args); err != nil {
		return j, err
	}
	if !path.IsAbs(j.root) {
		return j, fmt.Errorf("setup: --root %q: want an absolute path", j.root)
	}
	return j, nil
}
