// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/opencgpu/cgpu/pkg/gpusched"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/terminal"
)

func checkLedger(h *Host) Result {
	records, err := ledger.Open(h.RunDir).List()
	if errors.Is(err, fs.ErrPermission) {
		return skip("needs root: %v", err)
	}
	if err != nil {
		return fail("%v", err).but("stop the GPU containers of this machine, then remove the file")
	}
	h.records, h.counted = records, true
	var gone []string
	for _, c := range h.containers() {
		if c.Dead {
			gone = append(gone, c.Name)
		}
	}
	if len(gone) > 0 {
		return warn("%s gone, but in the ledger: %s", areContainers(len(gone)), strings.Join(gone, ", "))
	}
	return ok("%s", terminal.Plural(len(records), "container"))
}

func areContainers(n int) string {
	if n == 1 {
		return "1 container is"
	}
	return terminal.Plural(n, "container") + " are"
}

// containers says how those of the ledger fare.
func (h *Host) containers() []Container {
	if h.Containers == nil || len(h.records) == 0 {
		return nil
	}
	t, _ := h.node()
	return h.Containers(t, h.records)
}

func checkGuards(h *Host) Result {
	if !h.counted {
		return skip("the ledger could not be read")
	}
	return judgeGuards(h.containers())
}

// judgeGuards looks at those that are not gone.
func judgeGuards(list []Container) Result {
	var bad, alone []string
	n := 0
	for _, c := range list {
		if c.Dead {
			continue
		}
		n++
		if c.Bad {
			bad = append(bad, c.Name+": "+c.State)
		}
		if c.Alone {
			alone = append(alone, c.Name)
		}
	}
	switch {
	case len(bad) > 0:
		return fail("%s", strings.Join(bad, ", "))
	case len(alone) > 0:
		return warn("nobody decides about the GPU time of %s", strings.Join(alone, ", ")).
			but("guards start an arbiter within 10 s of work; log/arbiter-<UUID>.log in the run directory tells why there is none")
	case n == 0:
		return ok("no container runs")
	case n == 1:
		return ok("the one there is answers")
	}
	return ok("all %d answer", n)
}

// leftoverAge is how old a file without a record must be to count: guards and runtimes remove theirs in their own time.
const leftoverAge = 30 * time.Second

func checkLeftovers(h *Host) Result {
	if !h.counted { // everybody's files would look like nobody's
		return skip("the ledger could not be read")
	}
	used := map[string]bool{}
	for _, r := range h.records {
		used[r.Nonce] = true
	}
	var names []string
	for _, folder := range []string{"g", "page"} { // as package ledger names them
		entries, err := os.ReadDir(filepath.Join(h.RunDir, folder))
		if errors.Is(err, fs.ErrPermission) {
			return skip("needs root: %v", err)
		}
		for _, e := range entries {
			info, err := e.Info()
			if err == nil && time.Since(info.ModTime()) > leftoverAge && leftover(e.Name(), used) {
				names = append(names, filepath.Join(folder, e.Name()))
			}
		}
	}
	if len(names) > 0 {
		return warn("%s of containers that are gone, such as %s", terminal.Plural(len(names), "file"), names[0])
	}
	return ok("none")
}

// leftover says whether a name is one that we give, of a container that is in no record.
func leftover(name string, used map[string]bool) bool {
	nonce, suffix, dot := strings.Cut(name, ".")
	if len(nonce) != 16 || strings.Trim(nonce, "0123456789abcdef") != "" || used[nonce] {
		return false
	}
	if !dot {
		return true
	}
	switch "." + suffix {
	case ".sock", ".ctl", gpusched.LeftoversSuffix:
		return true
	}
	return false
}
