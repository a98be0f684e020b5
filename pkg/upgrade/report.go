// SPDX-License-Identifier: Apache-2.0

package upgrade

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/schema"
	"github.com/opencgpu/cgpu/pkg/terminal"
	"github.com/opencgpu/cgpu/pkg/view"
)

// Program is the path of a cgpu-guard, from the root; of the one beside this program where none is named.
func Program(path string) (string, error) {
	if path == "" {
		return device.Program("cgpu-guard")
	}
	absolute, err := filepath.Abs(path)
	if err != nil {
		return "", fmt.Errorf("upgrade: --program %q: %w", path, err)
	}
	if info, err := os.Stat(absolute); err != nil || !info.Mode().IsRegular() {
		return "", fmt.Errorf("upgrade: --program %q: want the path of a cgpu-guard (%w)", path, cmp.Or(err, errors.New("it is no file")))
	}
	return absolute, nil
}

// Report is what came of each container.
type Report struct {
	Lines   io.Writer // gets a line for each; may be nil
	results []Result
}

// Add takes the next one.
func (u *Report) Add(r Result) {
	u.results = append(u.results, r)
	if u.Lines == nil {
		return
	}
	text := map[Outcome]string{
		Done:    fmt.Sprintf("upgraded; its GPU calls waited for %s", shortTime(r.Stall)),
		Already: "is of that version already",
		Gone:    "has ended",
		Preload: "has no guard (enforcement = \"preload\"): its next start has the new library",
		Skipped: "not upgraded: stopped",
		Failed:  fmt.Sprintf("not upgraded: %v", r.Err),
	}[r.Outcome]
	fmt.Fprintf(u.Lines, "%s%s: %s\n", view.ShortID(r.ID), view.Label(r.Record), terminal.Printable(text))
}

// shortTime is a time in milliseconds.
func shortTime(d time.Duration) string { return fmt.Sprintf("%.1f ms", d.Seconds()*1e3) }

// Err says that some are not what was wanted.
func (u *Report) Err(of int) error {
	n := 0
	for _, r := range u.results {
		if r.Outcome == Failed || r.Outcome == Skipped {
			n++
		}
	}
	if n == 0 {
		return nil
	}
	return fmt.Errorf("upgrade: %d of %s not upgraded; their guards go on as they are, and cgpu upgrade can be called again", n,
		terminal.Plural(of, "container"))
}

// View is the same for -o json.
func (u *Report) View() schema.Upgrade {
	v := schema.Upgrade{Containers: []schema.UpgradedContainer{}}
	for _, r := range u.results {
		x := schema.UpgradedContainer{ID: r.ID, Outcome: string(r.Outcome), Stall: schema.SecondsOf(r.Stall), Tries: r.Tries}
		if r.Err != nil {
			x.Error = r.Err.Error()
		}
		v.Containers = append(v.Containers, x)
	}
	slices.SortFunc(v.Containers, func(a, b schema.UpgradedContainer) int { return cmp.Compare(a.ID, b.ID) })
	return v
}
