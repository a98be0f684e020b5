// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"bytes"
	"debug/buildinfo"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
)

// ours are the programs that find each other beside one another; cgpu-sim is one with the simulated driver.
var ours = []string{"cgpu", "cgpu-runtime", "cgpu-guard", "cgpu-hook", "cgpu-refresh"}

var programChecks = []Check{
	{Name: "programs", Means: "All programs of cgpu lie in one folder, only root can write them or replace them, and they are of one build.",
		Remedy: "install them anew, all of one version: make install", Run: checkPrograms},
}

func checkPrograms(h *Host) Result {
	names := ours
	if h.simulated() {
		names = append(slices.Clone(ours), "cgpu-sim")
	}
	var missing, loose, other []string
	builds := map[string][]string{}
	for _, name := range names {
		path := filepath.Join(h.Bin, name)
		info, err := os.Stat(path)
		if err != nil || info.Mode()&0o111 == 0 {
			missing = append(missing, name)
			continue
		}
		if h.written(info) {
			loose = append(loose, name)
		}
		if b, err := buildinfo.ReadFile(path); err == nil {
			key := buildOf(b)
			builds[key] = append(builds[key], name)
		}
		if slices.Contains(versioned, name) && !contains(path, h.Version) {
			other = append(other, name)
		}
	}
	if dir := h.openFolder(h.Bin); dir != "" && len(missing)+len(loose) == 0 {
		return fail("others than root may replace what is in %s, where root's programs lie", dir).but("chown root and chmod o-w it")
	}
	if len(missing)+len(loose) == 0 && len(other) > 0 {
		return warn("cgpu is of version %s, but not %s", h.Version, strings.Join(other, " and "))
	}
	return judgePrograms(h.Bin, h.Version, missing, loose, builds)
}

// written reports that others than root may write a file.
func (h *Host) written(info fs.FileInfo) bool { return !h.owns(info) || info.Mode().Perm()&0o022 != 0 }

// loose reports that others than root may write a program or put another in its place.
func (h *Host) loose(path string) bool {
	info, err := os.Stat(path)
	return err != nil || h.written(info) || h.openFolder(filepath.Dir(path)) != ""
}

// owns reports that a file is root's, or of the user who looks.
func (h *Host) owns(info fs.FileInfo) bool {
	st, isStat := info.Sys().(*syscall.Stat_t)
	return !isStat || int(st.Uid) == 0 || int(st.Uid) == h.UID
}

// openFolder is the first folder, from one up to the root, in which others may put another file in the place of one; "" if there
// is none. In a sticky folder they may not. Where links lead is looked at as well as where they lie.
func (h *Host) openFolder(dir string) string {
	paths := []string{dir}
	if real, err := filepath.EvalSymlinks(dir); err == nil && real != dir {
		paths = append(paths, real)
	}
	for _, path := range paths {
		for {
			info, err := os.Stat(path)
			if err == nil && (!h.owns(info) || info.Mode().Perm()&0o002 != 0 && info.Mode()&fs.ModeSticky == 0) {
				return path
			}
			up := filepath.Dir(path)
			if up == path {
				break
			}
			path = up
		}
	}
	return ""
}

// versioned are the programs that have the build's version in them, as cgpu has. The build information of the others may not tell
// it (-trimpath leaves the linker's flags out, and a package may be built without git at hand).
var versioned = []string{"cgpu-runtime", "cgpu-refresh"}

// contains looks for a version in a program; a version that is too short to be one is in everything.
func contains(path, version string) bool {
	if len(version) < 5 || version == "unknown" {
		return true
	}
	b, err := os.ReadFile(path)
	return err != nil || bytes.Contains(b, []byte(version))
}

// buildOf says of which source a program was built.
func buildOf(b *buildinfo.BuildInfo) string {
	revision, dirty := "", ""
	for _, s := range b.Settings {
		switch {
		case s.Key == "vcs.revision":
			revision = s.Value[:min(len(s.Value), 12)]
		case s.Key == "vcs.modified" && s.Value == "true":
			dirty = " with changes"
		}
	}
	if revision == "" {
		return b.Main.Version
	}
	return revision + dirty
}

// judgePrograms judges what lies in a folder: builds is by source, which programs are of it.
func judgePrograms(bin, version string, missing, loose []string, builds map[string][]string) Result {
	switch {
	case len(missing) > 0:
		return fail("%s lacks %s", bin, strings.Join(missing, ", "))
	case len(loose) > 0:
		return fail("others than root may write %s in %s, which root executes", strings.Join(loose, ", "), bin).
			but("chown root and chmod go-w them")
	case len(builds) > 1:
		var list []string
		for build, names := range builds {
			list = append(list, fmt.Sprintf("%s of %s", strings.Join(names, ", "), build))
		}
		slices.Sort(list)
		return warn("they are of several builds: %s", strings.Join(list, "; "))
	}
	return ok("in %s, version %s", bin, version)
}
